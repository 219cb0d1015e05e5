"""``mlflash demo``: train, train again and lose a node or a rank, and compare the results bit for bit."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..config import DISABLE
from ..errors import LaunchFailed, MlflashError
from ..run.processes import end_session, find_mpiexec, mpiexec, spawn
from ..text import listed, named

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

_KEPT_FROM = 4  # steps
RANKS_PER_NODE = 2
_LAUNCH_TIMEOUT_S = 150.0
_DEATH_TIMEOUT_S = 30.0  # for mpiexec to notice that ranks were killed
_TERM_TIMEOUT_S = 20.0
_POLL_S = 0.02


@click.command()
@click.option("--keep-alive", is_flag=True, help="Kill one rank, while the other process stays alive.")
@click.option("--elastic", is_flag=True, help="Kill one of four ranks: three train on, and the fourth comes back.")
@click.option("--steps", type=click.IntRange(3), default=20, show_default=True, help="Number of training steps.")
@click.option("--kill-step", type=click.IntRange(1), help="Step of the kill, before the last step.  [default: random]")
@click.option("--seed", type=int, help="Seed of the training and of the kill.  [default: random]")
@click.option("--redundancy", type=click.Choice(["copy", "none"]), default="copy", show_default=True,
              help="Redundancy scheme.")  # fmt: skip
def demo(keep_alive: bool, elastic: bool, steps: int, kill_step: int | None, seed: int | None, redundancy: str) -> None:
    """Train a small GPT, kill a node, relaunch, and compare the weights bit for bit.

    It needs no GPU, no cluster and no Slurm. 4 ranks on 2 emulated nodes train under DDP. With --keep-alive, 2 ranks
    train under `mlflash run --keep-alive`, and a process that waits takes the place of a killed one. Exits with 1 if
    the weights differ from those of an undisturbed run. With --elastic no process waits, and nothing is compared.
    """
    from rich.console import Console

    if kill_step is not None and kill_step >= steps:
        raise click.BadParameter(f"must be before the last step, {steps}", param_hint="--kill-step")
    if keep_alive and min(steps, kill_step or steps) < _KEPT_FROM:
        raise click.UsageError(f"--keep-alive needs --steps and --kill-step of at least {_KEPT_FROM}, because step 2 "
                               "is the first save")  # fmt: skip
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the ranks must not outlive us
    try:
        if elastic:
            watch_ranks(Console())
            return
        same = Demo(steps, seed, kill_step, redundancy, keep_alive).run(Console())
    except MlflashError as error:
        raise click.ClickException(str(error)) from error
    sys.exit(0 if same else 1)


class Launch(contextlib.AbstractContextManager["Launch"]):
    """A training that was started, and what its ranks have logged. Leave the context manager, and all of it has ended.

    Attributes:
        starts: rank → the line of each process that began to train as this rank, in order.
        steps: rank → step → its line.
        killed_at: when the demo killed ranks, Unix seconds; 0 before that.
        finished: the last step that these ranks had finished.
    """

    def __init__(self, folder: Path, ranks: int, command: Sequence[str], env: dict[str, str]):
        folder.mkdir()
        self.folder, self.killed_at, self.finished = folder, 0.0, 0
        self.starts: list[list[dict[str, Any]]] = [[] for _ in range(ranks)]
        self.steps: list[dict[int, dict[str, Any]]] = [{} for _ in range(ranks)]
        self._logs = [(folder / f"rank{rank}.jsonl").open("ab+") for rank in range(ranks)]
        # The output goes to a file, because a pipe must be read. Files that a killed mpiexec leaves in TMPDIR are
        # deleted with the folder.
        env = {**env, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1", DISABLE: ""}
        with (folder / "log").open("w") as log:
            self.launcher = spawn(command, env=env, stdout=log, stderr=log)

    def __exit__(self, *_: object) -> None:
        end_session(self.launcher, _TERM_TIMEOUT_S)  # SIGTERM first so that it can end the ranks in other sessions
        for log in self._logs:
            log.close()

    def last_step(self, rank: int) -> int:
        return max(self.steps[rank], default=0 if self.starts[rank] else -1)

    def read(self) -> None:
        """Read the lines that were added to the logs since the last call."""
        for rank, log in enumerate(self._logs):
            while (text := log.readline()).endswith(b"\n"):
                line = json.loads(text)
                if line["event"] == "start":
                    self.starts[rank].append(line)
                else:
                    self.steps[rank][line["step"]] = line
            log.seek(-len(text), os.SEEK_CUR)  # the last line may be half written

    def kill(self, ranks: Sequence[int]) -> None:
        self.killed_at = time.time()
        for rank in ranks:
            os.kill(self.starts[rank][-1]["pid"], signal.SIGKILL)
        self.read()
        self.finished = max(map(self.last_step, ranks))

    def failure(self, text: str) -> LaunchFailed:
        """Return an error that ends with the last lines of the output."""
        lines = (self.folder / "log").read_text(errors="replace").splitlines()[-15:]
        return LaunchFailed("\n    ".join([f"{text}; the end of {self.folder / 'log'}:", *lines]))


class Demo:
    """A demo. What is not given is chosen at random: the seed, and from it the step, the node or rank, and the moment.

    ``keeps``: the other processes stay when a rank is killed. Otherwise a node is killed, and all start again.
    """

    def __init__(self, steps: int, seed: int | None, kill_step: int | None, redundancy: str, keeps: bool):
        chance = random.SystemRandom()
        self._seed = chance.randrange(10**6) if seed is None else seed
        self._job = f"demo-{os.getpid()}-{chance.randrange(16**8):08x}"
        dice = random.Random(self._seed)
        # From step 4 on, the first save had time to commit. If processes stay, all must still train when one is killed.
        last = min(max(4, steps // 2) if keeps else steps, steps - 1)
        self._kill_step = kill_step or dice.randint(min(4, last), last)
        self._node, self._moment = dice.randrange(2), dice.random()
        self._steps, self._redundancy, self._keeps = steps, redundancy, keeps
        # For copies, each rank counts as a node if processes stay.
        self._per_node = 1 if keeps else RANKS_PER_NODE
        self._ranks = 2 * self._per_node
        self._memory = Path(os.environ.get("MLFLASH_MEMORY") or "/dev/shm", self._job)
        self._doomed = range(self._node * self._per_node, (self._node + 1) * self._per_node)

    def run(self, console: Console) -> bool:
        """Run it, print a summary, and return whether the final tensors are those of an uninterrupted run, bit for bit.

        Logs and tensors are kept if something went wrong.
        """
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        start = time.monotonic()
        launcher = "mlflash run --keep-alive" if self._keeps else find_mpiexec()[1]
        if importlib.util.find_spec("torch") is None:  # it takes seconds to import
            raise ModuleNotFoundError("the demo trains with PyTorch", name="torch")
        where = "and a waiting process" if self._keeps else "on 2 emulated nodes"
        _print(console, training=f"a small GPT, DDP over gloo, {self._steps} steps; {self._ranks} ranks {where}")
        _print(console, with_=f"{launcher}; redundancy {self._redundancy}; seed {self._seed}")
        folder, is_same = Path(tempfile.mkdtemp(prefix="mlflash-demo-")), False
        columns = TextColumn("{task.description:<14}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        try:
            with Progress(*columns, console=console) as bars:
                whole = self._train(folder / "uninterrupted", f"{self._job}-reference", bars)
                times = [line["time"] for line in whole.steps[0].values()]
                delay_s = self._moment * (times[-1] - times[0]) / (len(times) - 1)
                broken = last = self._train(folder / "interrupted", self._job, bars, delay_s)
                if not self._keeps:
                    shutil.rmtree(node := self._memory / f"node{self._node}")
                    last = self._train(folder / "relaunched", self._job, bars)
            if self._keeps:
                self._describe_kept(console, broken)
            else:
                _print(console, survives=last.starts[0][0]["survives"], killed=f"node{self._node} "
                       f"({named(self._doomed)}) with SIGKILL in step {broken.finished + 1}", deleted=node,
                       restored=_origin([line for line, in last.starts]))  # fmt: skip
            lost = max(broken.finished - last.starts[0][-1]["step"], 0)
            loss, reference = (launch.steps[0][self._steps]["loss"] for launch in (last, whole))
            different = _differences(whole.folder, last.folder)
            is_same = not different
            _print(console, trained_again=f"{lost} of {broken.finished} finished steps",
                   loss=f"{loss:.4f}, uninterrupted {reference:.4f}",
                   **{"differs": listed(different, 20)} if different else {},
                   in_all=f"{time.monotonic() - start:.0f} s")  # fmt: skip
        finally:
            shutil.rmtree(self._memory, ignore_errors=True)
            if is_same:
                shutil.rmtree(folder)
            else:
                console.print(f"{folder} keeps the logs and the final tensors", highlight=False, soft_wrap=True)
        console.print(f"final weights {'are bit-identical to' if is_same else 'differ from'} an uninterrupted run",
                      soft_wrap=True)  # fmt: skip
        return is_same

    def _train(self, folder: Path, job: str, bars: Progress, delay_s: float | None = None) -> Launch:
        """Train to the end. With ``delay_s``, kill ranks: so many seconds after they finished the step before."""
        bar = bars.add_task(folder.name, total=None)  # it pulses while the processes start
        deadline, is_running = time.monotonic() + _LAUNCH_TIMEOUT_S, True
        with Launch(folder, self._ranks, *self._command(folder, job, spares=int(delay_s is not None))) as launch:
            while is_running and time.monotonic() < deadline:
                time.sleep(_POLL_S)
                is_running = launch.launcher.poll() is None
                launch.read()
                bars.update(bar, completed=launch.last_step(0), total=self._steps if launch.starts[0] else None)
                is_due = min(map(launch.last_step, self._doomed)) >= self._kill_step - 1
                if delay_s is not None and is_running and is_due and not launch.killed_at:
                    time.sleep(delay_s)
                    launch.kill(self._doomed)
                    deadline = deadline if self._keeps else time.monotonic() + _DEATH_TIMEOUT_S
        if delay_s is not None and not launch.killed_at:
            raise launch.failure(f"training ended before step {self._kill_step}, in which the demo kills ranks of it")
        # Open MPI has exited with 0 after a crash, so each rank must also have written its tensors.
        ends = len([*folder.glob("*.npz")])
        if (self._keeps or not launch.killed_at) and (launch.launcher.returncode or ends < self._ranks):
            raise launch.failure(f"the launcher exited with {launch.launcher.returncode} (after at most "
                                 f"{_LAUNCH_TIMEOUT_S:g} s), and {ends} of {self._ranks} ranks finished")  # fmt: skip
        bars.stop_task(bar)
        return launch

    def _command(self, folder: Path, job: str, spares: int) -> tuple[list[str], dict[str, str]]:
        train = ["-m", "mlflash.tools.demo_train", f"--steps={self._steps}", f"--seed={self._seed}",
                 f"--folder={folder}", f"--memory={self._memory}", f"--ranks-per-node={self._per_node}"]  # fmt: skip
        env = {"MLFLASH_REDUNDANCY": self._redundancy, "MLFLASH_JOB": job}
        if not self._keeps:
            return mpiexec(self._ranks, [sys.executable, "-m", "mpi4py", *train], env)
        run = ["run", "-N1", f"--ranks-per-node={self._ranks}", "--keep-alive", f"--spares={spares}", f"--job={job}",
               f"--journal={folder / 'run.jsonl'}", "--max-restarts=0", "--grace=0", "--"]  # fmt: skip
        return [sys.executable, "-m", "mlflash", *run, sys.executable, *train], {**os.environ, **env}

    def _describe_kept(self, console: Console, launch: Launch) -> None:
        pids = [[line["pid"] for line in lines] for lines in launch.starts]
        (doomed,), stayed = self._doomed, 1 - self._node
        if [*map(len, pids)] != [2, 2] or pids[stayed][0] != pids[stayed][1]:
            raise launch.failure(f"a process should have stayed, and another one been replaced, but were not: {pids}")
        step = launch.starts[0][1]["step"]
        began_s = max(lines[1]["time"] for lines in launch.starts) - launch.killed_at
        ended_s = max(steps[step + 1]["time"] for steps in launch.steps) - launch.killed_at
        _print(
            console,
            killed=f"rank {doomed} (process {pids[doomed][0]}) with SIGKILL in step {launch.finished + 1}",
            stayed=f"rank {stayed}: process {pids[stayed][1]}, the same as before",
            replaced=f"rank {doomed} by process {pids[doomed][1]}, which had waited",
            continued=f"from step {step}, {began_s:.1f} s after the kill; step {step + 1} ended after {ended_s:.1f} s",
        )


def watch_ranks(console: Console) -> None:
    """Let four ranks train, kill one, and print how three train on, and how the fourth comes back.

    Raises LaunchFailed: it did not happen in time.
    """
    ranks, doomed = 4, 2
    folder = Path(tempfile.mkdtemp(prefix="mlflash-demo-"))
    memory = Path(os.environ.get("MLFLASH_MEMORY") or "/dev/shm", folder.name)
    memory.mkdir(0o700)
    run = ["run", "-N1", f"--ranks-per-node={ranks}", f"--min-ranks={ranks - 1}", "--keep-alive", "--job=demo",
           f"--journal={folder / 'run.jsonl'}", f"--memory={memory}", "--max-restarts=0", "--grace=0", "--",
           sys.executable, "-m", "mlflash.tools.demo_train", "--steps=100000",
           f"--folder={folder / 'ranks'}"]  # fmt: skip
    env = {**os.environ, "MLFLASH_REDUNDANCY": "none"}
    _print(console, training=f"a small GPT, DDP over gloo; {ranks} ranks under mlflash run --keep-alive, none waits")
    try:
        with Launch(folder / "ranks", ranks, [sys.executable, "-m", "mlflash", *run], env) as launch:

            def wait_for(holds: Callable[[], object], what: str) -> None:
                deadline = time.monotonic() + _LAUNCH_TIMEOUT_S
                while not holds():
                    if time.monotonic() > deadline or launch.launcher.poll() is not None:
                        raise launch.failure(f"{what} did not come in time")
                    time.sleep(_POLL_S)
                    launch.read()

            def show(size: int, after: int) -> None:
                """Wait until so many ranks have ended a step after this one, and print it."""
                wait_for(lambda: min(map(launch.last_step, range(size))) > after, f"a step of {size} ranks")
                pids = ", ".join(str(launch.starts[rank][-1]["pid"]) for rank in range(size))
                _print(
                    console, **{f"step {min(map(launch.last_step, range(size)))}": f"{size} ranks: processes {pids}"}
                )

            show(ranks, _KEPT_FROM)
            launch.kill([doomed])
            _print(console, killed=f"rank {doomed}, process {launch.starts[doomed][-1]['pid']}")
            wait_for(lambda: _events(folder, "recovered"), "a recovery")
            show(ranks - 1, launch.finished + 1)
            (recovered,) = _events(folder, "recovered")
            _print(console, recovered=f"{recovered['seconds']:.1f} s later, from step {recovered['step']}")
            wait_for(lambda: _events(folder, "moved"), "the fourth rank")
            show(ranks, max(map(launch.last_step, range(ranks - 1))))
    finally:
        shutil.rmtree(memory, ignore_errors=True)
    shutil.rmtree(folder)


def _events(folder: Path, name: str) -> list[dict[str, Any]]:
    """The events of this name in the journal."""
    path = folder / "run.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for event in map(json.loads, lines) if event["event"] == name]


def _print(console: Console, **rows: object) -> None:
    for name, text in rows.items():
        console.print(f"{name.strip('_').replace('_', ' '):<14} {text}", highlight=False, soft_wrap=True, markup=False)


def _origin(starts: Sequence[dict[str, Any]]) -> str:
    if starts[0]["step"] == 0:
        return "nothing: memory had no complete checkpoint, so training began from the start"
    ranks_from: dict[str, list[int]] = {}
    for rank, line in enumerate(starts):
        ranks_from.setdefault(line["source"], []).append(rank)
    sources = [f"{named(ranks)} from the memory of {node}" for node, ranks in sorted(ranks_from.items())]
    return f"step {starts[0]['step']}: {', '.join(sources)}"


def _differences(*folders: Path) -> list[str]:
    """Compare the final tensors of two launches bit by bit. Return the name and rank of each that differs."""
    import numpy as np

    def tensors(folder: Path) -> dict[str, tuple[str, bytes]]:
        arrays = {f"{name} on {path.stem}": array for path in folder.glob("*.npz")
                  for name, array in np.load(path).items()}  # fmt: skip
        return {name: (f"{array.dtype}{array.shape}", array.tobytes()) for name, array in arrays.items()}

    expected, actual = map(tensors, folders)
    return sorted(name for name in expected | actual if expected.get(name) != actual.get(name))
