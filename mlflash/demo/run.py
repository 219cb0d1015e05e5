"""Train, train again and lose a node, relaunch, compare: what ``mlflash demo`` does."""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..launcher.processes import find_mpiexec
from ..memory.node_directory import job_path
from ..placement.topology import Topology
from .comparison import Told, describe_origin, describe_seconds, differences
from .one_launch import DemoFailed, Training

_RANKS, _RANKS_PER_NODE = 4, 2
_TOPOLOGY = Topology(tuple(rank // _RANKS_PER_NODE for rank in range(_RANKS)), ("node0", "node1"))
_LAUNCH_TIMEOUT_S = 150.0
_SHOWN = 20  # tensors named where they differ


@dataclasses.dataclass(frozen=True)
class Plan:
    """What happens in a demo, known before it starts.

    Attributes:
        steps: training steps.
        seed: of training, and of all that is drawn here.
        redundancy: "copy" or "none".
        kill_step: the node dies in this step.
        node: the node that dies.
        moment: how far into the step, 0 to 1.
        job: job name; no other run has it.
    """

    steps: int
    seed: int
    redundancy: str
    kill_step: int
    node: int
    moment: float
    job: str


def draw(steps: int, seed: int | None, kill_step: int | None, redundancy: str) -> Plan:
    """Draw what was not given: the seed, and from it the step, the node and the moment."""
    chance = random.SystemRandom()
    seed = chance.randrange(10**6) if seed is None else seed
    dice = random.Random(seed)
    step = dice.randint(min(4, steps - 1), steps - 1)  # from 4 on, the first save had time to be committed
    node, moment = dice.randrange(len(_TOPOLOGY.ranks_on)), dice.random()
    job = f"demo-{os.getpid()}-{chance.randrange(16**8):08x}"
    return Plan(steps, seed, redundancy, kill_step or step, node, moment, job)


def run(plan: Plan, console: Console) -> bool:
    """Run the demo and print its account; logs and tensors are kept where something went wrong.

    Not collective: it starts the ranks itself.

    Returns:
        Whether the final tensors are bit-identical to those of an uninterrupted run.

    Raises:
        DemoFailed: a launch did not end as it should.
        MpiUnavailable: there is no mpiexec.
    """
    start = time.monotonic()
    find_mpiexec()  # without one nothing is made
    folder = Path(tempfile.mkdtemp(prefix="mlflash-demo-"))
    memory = os.environ.get("MLFLASH_MEMORY") or "/dev/shm"
    same = False
    try:
        different = _train_and_compare(plan, console, folder, memory)
        _print(console, [("in all", f"{time.monotonic() - start:.0f} s")])
        same = not different
    finally:
        for job in (plan.job, _reference(plan)):
            shutil.rmtree(job_path(memory, job) or folder / job, ignore_errors=True)
        if same:
            shutil.rmtree(folder)
        else:
            console.print(f"logs and final tensors are kept in {folder}", highlight=False, soft_wrap=True)
    if same:
        console.print("final weights are bit-identical to an uninterrupted run", soft_wrap=True)
    else:
        console.print(f"final weights differ from an uninterrupted run, in {len(different)} tensors", soft_wrap=True)
    return same


def _reference(plan: Plan) -> str:
    return f"{plan.job}-reference"


def _train_and_compare(plan: Plan, console: Console, folder: Path, memory: str) -> list[str]:
    nodes = len(_TOPOLOGY.ranks_on)
    _print(console, [
        ("training", f"a small GPT, DDP over gloo, {plan.steps} steps; {_RANKS} ranks on {nodes} emulated nodes"),
        ("with", f"{find_mpiexec()[1]}; redundancy {plan.redundancy}; seed {plan.seed}"),
    ])  # fmt: skip
    columns = TextColumn("{task.description:<14}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as bars:
        whole = _follow(plan, folder / "uninterrupted", _reference(plan), bars)
        delay_s = plan.moment * sum(whole.step_s) / len(whole.step_s)
        broken = _follow(plan, folder / "losing-a-node", plan.job, bars, kill_after_s=delay_s)
        wiped = _wipe(Path(job_path(memory, plan.job) or memory, f"node{plan.node}"))
        again = _follow(plan, folder / "relaunched", plan.job, bars)

    doomed = _TOPOLOGY.ranks_on[plan.node]
    finished = max(broken.last_step[rank] for rank in doomed)
    ready = again.ready[0]
    restored = ready["restored"] or 0
    _print(console, [
        ("survives", ready["survives"]),
        ("killed", f"node{plan.node} (ranks {', '.join(map(str, doomed))}) with SIGKILL in step {finished + 1}"),
        ("wiped", wiped),
        ("restored", describe_origin(again, _TOPOLOGY)),
        ("trained again", f"{max(finished - restored, 0)} of {finished} finished steps"),
        ("loss", f"{again.loss:.4f}, uninterrupted {whole.loss:.4f}; {ready['parameters'] / 1e6:.2f} M parameters"),
        *describe_seconds([whole, again], again),
    ])  # fmt: skip
    different = differences(folder / "uninterrupted", folder / "relaunched", _RANKS)
    _print(console, [("differs", line) for line in different[:_SHOWN]])
    if len(different) > _SHOWN:
        (folder / "differences").write_text("\n".join(different) + "\n")
        _print(console, [("", f"and {len(different) - _SHOWN} more, see {folder / 'differences'}")])
    return different


def _follow(plan: Plan, folder: Path, job: str, bars: Progress, kill_after_s: float | None = None) -> Told:
    """Launch the ranks and show how far they are; with ``kill_after_s``, kill the node so far into the step."""
    env = {
        "MLFLASH_JOB": job,
        "MLFLASH_REDUNDANCY": plan.redundancy,
        "MLFLASH_RANKS_PER_NODE": str(_RANKS_PER_NODE),
    }
    doomed = _TOPOLOGY.ranks_on[plan.node]
    bar = bars.add_task(folder.name.replace("-", " "), total=None)  # it pulses while the ranks start
    folder.mkdir()
    told = Told()
    arguments = ["--steps", str(plan.steps), "--seed", str(plan.seed)]
    with Training(folder, _RANKS, arguments, env, _LAUNCH_TIMEOUT_S) as training:
        for rank, line in training.events():
            told.note(rank, line)
            if rank == 0:
                bars.update(bar, completed=told.last_step.get(0, 0), total=plan.steps if told.ready else None)
            if kill_after_s is not None and all(told.last_step.get(r, -1) >= plan.kill_step - 1 for r in doomed):
                time.sleep(kill_after_s)
                training.kill(doomed)
                kill_after_s = None
    if kill_after_s is not None:
        raise DemoFailed(f"training ended before step {plan.kill_step}, in which a node was to be killed")
    bars.stop_task(bar)
    return told


def _wipe(node: Path) -> str:
    """Delete what a node held in memory, as its crash does; says what that was."""
    files = [path for path in node.iterdir() if path.is_file()] if node.exists() else []
    nbytes = sum(path.stat().st_size for path in files)
    if files:
        shutil.rmtree(node)
    return f"{node}: {len(files)} files, {nbytes / (1 << 20):.0f} MiB"


def _print(console: Console, rows: list[tuple[str, str]]) -> None:
    for name, text in rows:
        console.print(f"{name:<14} {text}", highlight=False, soft_wrap=True, markup=False)
