"""``mlflash demo``: train, train again and lose a node, relaunch, and compare. `kept_run` loses a rank instead."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..launcher.processes import find_mpiexec
from ..memory.node_directory import job_path
from . import kept_run
from .comparison import Told, describe_origin, describe_seconds, differences, print_rows
from .one_launch import DemoFailed, Training, by_mpiexec
from .plan import RANKS, RANKS_PER_NODE, TOPOLOGY, Plan

_LAUNCH_TIMEOUT_S = 150.0
_SHOWN = 20  # differing tensors that are named


def run(plan: Plan, console: Console) -> bool:
    """Run the demo and print a summary. Keep logs and tensors if something went wrong.

    Not collective: it starts the ranks itself.

    Returns:
        Whether the final tensors are bit-identical to those of an uninterrupted run.

    Raises:
        DemoFailed: a launch did not end as it should.
        MpiUnavailable: there is no mpiexec. The demo needs it unless processes stay.
        ModuleNotFoundError: there is no PyTorch.
    """
    start = time.monotonic()
    if not plan.keeps:
        find_mpiexec()  # raises before anything is made
    if importlib.util.find_spec("torch") is None:  # it takes seconds to import
        raise ModuleNotFoundError("the demo trains with PyTorch", name="torch")
    folder = Path(tempfile.mkdtemp(prefix="mlflash-demo-"))
    memory = os.environ.get("MLFLASH_MEMORY") or "/dev/shm"
    same = False
    try:
        columns = TextColumn("{task.description:<14}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        bars = Progress(*columns, console=console)
        if plan.keeps:
            different = kept_run.train_and_compare(plan, console, folder, bars)
        else:
            different = _train_and_compare(plan, console, folder, memory, bars)
        _show(different, console, folder)
        print_rows(console, [("in all", f"{time.monotonic() - start:.0f} s")])
        same = not different
    finally:
        for job in (plan.job, plan.reference):
            shutil.rmtree(job_path(memory, job) or folder / job, ignore_errors=True)
        if same:
            shutil.rmtree(folder)
        else:
            console.print(f"{folder} keeps the logs and the final tensors", highlight=False, soft_wrap=True)
    if same:
        console.print("final weights are bit-identical to an uninterrupted run", soft_wrap=True)
    else:
        console.print(f"final weights differ from an uninterrupted run, in {len(different)} tensors", soft_wrap=True)
    return same


def _train_and_compare(plan: Plan, console: Console, folder: Path, memory: str, bars: Progress) -> list[str]:
    nodes = len(TOPOLOGY.ranks_on)
    print_rows(console, [
        ("training", f"a small GPT, DDP over gloo, {plan.steps} steps; {RANKS} ranks on {nodes} emulated nodes"),
        ("with", f"{find_mpiexec()[1]}; redundancy {plan.redundancy}; seed {plan.seed}"),
    ])  # fmt: skip
    with bars:
        whole = _follow(plan, folder / "uninterrupted", plan.reference, bars)
        delay_s = plan.moment * sum(whole.step_s) / len(whole.step_s)
        broken = _follow(plan, folder / "losing-a-node", plan.job, bars, kill_after_s=delay_s)
        wiped = _wipe(Path(job_path(memory, plan.job) or memory, f"node{plan.doomed}"))
        again = _follow(plan, folder / "relaunched", plan.job, bars)

    doomed = TOPOLOGY.ranks_on[plan.doomed]
    finished = max(broken.last_step[rank] for rank in doomed)
    ready = again.ready[0]
    restored = ready["restored"] or 0
    print_rows(console, [
        ("survives", ready["survives"]),
        ("killed", f"node{plan.doomed} (ranks {', '.join(map(str, doomed))}) with SIGKILL in step {finished + 1}"),
        ("wiped", wiped),
        ("restored", describe_origin(again, TOPOLOGY)),
        ("trained again", f"{max(finished - restored, 0)} of {finished} finished steps"),
        ("loss", f"{again.loss:.4f}, uninterrupted {whole.loss:.4f}; {ready['parameters'] / 1e6:.2f} M parameters"),
        *describe_seconds([whole, again], again),
    ])  # fmt: skip
    return differences(folder / "uninterrupted", folder / "relaunched", RANKS)


def _show(different: list[str], console: Console, folder: Path) -> None:
    print_rows(console, [("differs", line) for line in different[:_SHOWN]])
    if len(different) > _SHOWN:
        (folder / "differences").write_text("\n".join(different) + "\n")
        print_rows(console, [("", f"and {len(different) - _SHOWN} more, see {folder / 'differences'}")])


def _follow(plan: Plan, folder: Path, job: str, bars: Progress, kill_after_s: float | None = None) -> Told:
    """Launch the ranks and show their progress. With ``kill_after_s``, kill the node at this time in the step."""
    env = {
        "MLFLASH_JOB": job,
        "MLFLASH_REDUNDANCY": plan.redundancy,
        "MLFLASH_RANKS_PER_NODE": str(RANKS_PER_NODE),
    }
    doomed = TOPOLOGY.ranks_on[plan.doomed]
    bar = bars.add_task(folder.name.replace("-", " "), total=None)  # the bar pulses while the ranks start
    folder.mkdir()
    told = Told()
    arguments = ["--steps", str(plan.steps), "--seed", str(plan.seed)]
    with Training(folder, RANKS, by_mpiexec(folder, RANKS, arguments, env), _LAUNCH_TIMEOUT_S) as training:
        for rank, line in training.events():
            told.note(rank, line)
            if rank == 0:
                bars.update(bar, completed=told.last_step.get(0, 0), total=plan.steps if told.ready else None)
            if kill_after_s is not None and all(told.last_step.get(r, -1) >= plan.kill_step - 1 for r in doomed):
                time.sleep(kill_after_s)
                training.kill(doomed)
                kill_after_s = None
    if kill_after_s is not None:
        raise DemoFailed(f"training ended before step {plan.kill_step}, in which the demo kills a node")
    bars.stop_task(bar)
    return told


def _wipe(node: Path) -> str:
    """Delete what a node held in memory, like a crash of the node. Return a description of it."""
    files = [path for path in node.iterdir() if path.is_file()] if node.exists() else []
    nbytes = sum(path.stat().st_size for path in files)
    if files:
        shutil.rmtree(node)
    return f"{node}: {len(files)} files, {nbytes / (1 << 20):.0f} MiB"
