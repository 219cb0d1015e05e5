"""``mlflash bench``: measure saves, restores and recoveries on this cluster, and write a report to send back."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import secrets
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..config import DISABLE, Config
from ..errors import LaunchFailed, MlflashError
from ..launch.interfaces import own_address
from ..launch.launcher_variables import as_torchrun, without_rank
from ..launch.rendezvous import TOKEN, free_port
from ..memory.memory_limits import available
from ..mpi.fabric import between_nodes
from ..mpi.world import World
from ..text import last_words, named, show_seconds
from ..version import __version__
from . import completion
from .bench_rank import RESULT
from .bench_report import (
    FORMAT,
    VERSION,
    fabric_variables,
    figure,
    gpus,
    machine,
    private_words,
    redacted,
    show,
    slowest,
)
from .demo import Launch
from .options import BYTES, json_option, memory_option
from .run_on_ranks import Answer, raise_deadline, together

if TYPE_CHECKING:
    from collections.abc import Callable

_REPETITIONS, _KILLS = 5, 3
_JOB = "bench"
_ALONE = 4  # ranks, if the command is one process: as many nodes as Reed-Solomon codes with two parities need
_GROUP = 8  # nodes of a parity group
_SLOTS = 32  # so many default states must fit into free memory: slots, copies, the state twice, and room
_MOST_NBYTES, _LEAST_NBYTES = 1 << 30, 1 << 20
_TRIAL_S, _RANK_S = 180.0, 60.0  # longest time of a launch, and of an operation in it
_END_S, _LOOK_S = 20.0, 0.02
_KEPT = 2  # ranks of a recovery in place
_STEPS = 3  # that these do before one is killed
_SEND = "Nothing was sent. The report is in {}: attach it to an issue of the project."


@click.command()
@click.option("--size", callback=BYTES, help="State of each rank.  [default: by free memory, at most 1GiB]")
@click.option("--minutes", type=click.FloatRange(0, min_open=True), default=20, show_default=True,
              help="Time for everything. What does not fit is reported as not run.")  # fmt: skip
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default="mlflash-bench.json",
              show_default=True, shell_complete=completion.files, help="File for the report.")  # fmt: skip
@click.option("--names", is_flag=True, help="Keep names of hosts and users, paths and addresses in the report.")
@memory_option
@json_option
@together
def bench(world: World, config: Config, job: str | None, size: int | None, minutes: float, out: Path,
          names: bool) -> Answer | None:  # fmt: skip
    """Measure saves, restores and recoveries on these nodes, and write a report that you can send back.

    \b
    mlflash bench
    srun -N4 --ntasks-per-node=1 --mpi=pmi2 mlflash bench --out report.json

    Start one process for each rank, as a training. On one node, each rank is an emulated node of its own, and a single
    process starts four. Ranks are killed, and memory of nodes is deleted: only of processes that this command started.
    The report has no names of hosts or users, no paths and no addresses. Nothing is sent.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the ranks must not outlive us
    with Bench(world, config, size, minutes, out, names).opened() as measured:
        measured.run()
    if world.rank:
        return None
    report = measured.report

    def words(console: Any) -> None:
        show(report, console)
        console.print(_SEND.format(out), soft_wrap=True)

    return Answer(bool(report["figures"]), report, words)


class Bench:
    """Starts ranks, one launch after the other, and makes a report of what they measure.

    Each process of the command starts one rank of each launch; alone it starts all. Ranks meet as under torchrun, so
    that the launcher's MPI has no part in what is measured.

    Attributes:
        report: what is known so far, on rank 0.
    """

    def __init__(self, world: World, config: Config, size: int | None, minutes: float, out: Path, names: bool):
        self._world, self._config, self._out, self._names = world, config, out, names
        self._deadline = time.monotonic() + 60 * minutes
        self._is_emulated = len(world.topology.node_names) == 1
        self._size = world.size if world.size > 1 else _ALONE
        self._mine = [world.rank] if world.size > 1 else [*range(_ALONE)]
        self._node_of = [*range(self._size)] if self._is_emulated else [*world.topology.node_of]
        self._nodes = max(self._node_of) + 1
        self._longest_s = 0.0  # of a launch
        self._words: dict[str, str] = {}
        self._between = "one host"
        self.report: dict[str, Any] = {}
        here = len(self._mine) if world.size == 1 else world.local_size
        free = min(available(config.memory).values()) // (_SLOTS * here)
        default = min(_MOST_NBYTES, max(_LEAST_NBYTES, 1 << max(free.bit_length() - 1, 0)))
        self._nbytes = size or min(self._gather(default))

    @contextlib.contextmanager
    def opened(self) -> Iterator[Bench]:
        """Make a directory in the memory of each node, and delete it afterwards."""
        self._top = Path(self._config.memory, f"mlflash-bench-{self._tell(secrets.token_hex(4))}")
        self._top.mkdir(0o700, exist_ok=True)
        try:
            yield self
        finally:
            shutil.rmtree(self._top, ignore_errors=True)

    def run(self) -> None:
        """Measure everything, and write the report after each figure. Collective over the world."""
        self._describe()
        self._try("fabric", self._fabric)
        parities = [f"xor:{min(self._nodes, _GROUP)}"] if self._nodes > 2 else []
        parities += [f"rs:{min(self._nodes, _GROUP) - 2}+2"] if self._nodes > 3 else []
        for scheme, transport in [("none", ""), *itertools.product(["copy"], ["p2p", "rma"]),
                                  *itertools.product(parities, ["p2p", "rma"])]:  # fmt: skip
            self._try(f"saves with {scheme}" + f" by {transport}" * bool(transport), self._saves, scheme, transport)
        for scheme, least in (("xor", 3), ("rs", 4)):
            if self._nodes < least:
                self._not_run(f"saves with {scheme}", f"needs {least} nodes, and there are {self._nodes}")
        self._try("recovery in place", self._kept)
        self._try("GPU", self._gpu, "cuda")
        self.report["complete"] = True
        self._write()

    # What is measured

    def _describe(self) -> None:
        self._between = between_nodes(self._world) if self._world.size > 1 else "one host"
        of_ranks = self._gather(
            (machine(self._config.memory), socket.gethostname(), private_words(self._config.memory))
        )
        self._words = {word: stands for _, _, words in of_ranks for word, stands in words.items()}
        kinds: dict[str, dict[str, Any]] = {}
        for description, name, _ in [of_ranks[ranks[0]] for ranks in self._world.topology.ranks_on]:
            node = kinds.setdefault(json.dumps(description), {"count": 0, **description})
            node["count"] += 1
            if self._names:
                node.setdefault("names", []).append(name)
        self.report = {
            "format": FORMAT, "version": VERSION, "mlflash": __version__, "complete": False,
            "settings": {"ranks": self._size, "nodes": self._nodes, "emulated": self._is_emulated,
                         "size_nbytes": self._nbytes, "repetitions": _REPETITIONS},
            "nodes": [*kinds.values()], "fabric": {"between": self._between, "variables": fabric_variables(os.environ)},
            "figures": [], "not_run": [],
        }  # fmt: skip
        self.report["nodes"], self.report["fabric"] = (
            self._clean(self.report["nodes"]),
            self._clean(self.report["fabric"]),
        )

    def _fabric(self) -> None:
        """Time MPI's own messages and Puts between the first two nodes, by the MPI of couriers."""
        peer = self._node_of.index(1)
        answers = self._launch({"task": "fabric", "repetitions": _REPETITIONS, "peer": peer}, runs_mpi=True)
        samples, nbytes = answers[0]["samples"], answers[0]["nbytes"]
        self.report["fabric"] |= self._clean({name: answers[0][name] for name in ("library", "device")})
        self._add(figure("memcpy", samples["memcpy"], "", [], nbytes))
        for name in ("Send/Recv", "Put"):
            self._add(figure(f"{name} to another node", samples[name], "memcpy", samples["memcpy"], nbytes))
            self._add(figure(f"{name} of 8 bytes", samples[f"{name} latency"], "", [], 8))

    def _saves(self, scheme: str, transport: str) -> None:
        """Time saves and restores, then kill all ranks, delete the memory of the last nodes, and restore again."""
        settings = {"redundancy": scheme, **({"transport": transport} if transport else {})}
        job = {"nbytes": self._nbytes, "settings": settings}
        losses = 0 if scheme == "none" else 2 if scheme.startswith("rs") else 1
        lost = range(self._nodes - losses, self._nodes)
        answers = self._launch({"task": "saves", "repetitions": _REPETITIONS, **job}, lost)
        samples = slowest(answer["samples"] for answer in answers)
        self.report["fabric"] |= self._clean({"mpi": answers[0]["mpi"]})
        for what, yardstick in (
            ("stall", "memcpy"),
            ("commit", "memcpy"),
            ("restore in place", "memcpy before restore"),
        ):
            taken = samples[what.split()[0]]
            self._add(figure(what, taken, "memcpy", samples[yardstick], self._nbytes, scheme, transport))
        if not losses:
            return
        rounds = []
        try:
            for number in range(_KILLS):
                task = {"task": "relaunched", **job}
                answers = self._launch(task, lost if number < _KILLS - 1 else ())
                rounds.append(slowest(answer["samples"] for answer in answers))
        finally:
            if rounds:  # some may have failed
                times = {what: [value for samples in rounds for value in samples[what]] for what in rounds[0]}
                what = f"restore after {losses} lost node{'s' * (losses > 1)}"
                self._add(figure(what, times["restore"], "memcpy", times["memcpy"], self._nbytes, scheme, transport))
                self._add(figure("connect after a kill", times["connect"], "", [], 0, scheme, transport))

    def _kept(self) -> None:
        """Kill one of two ranks under `mlflash run --keep-alive` on the first node, where a third process waits."""
        seconds: list[float] = []
        memcpy: list[float] = []
        error = ""
        end = min(time.monotonic() + _TRIAL_S, self._deadline)
        try:
            for number in range(_KILLS if self._world.rank == 0 else 0):
                took_s, copy_s = self._recovery(self._top / f"kept{number}", end)
                seconds, memcpy = [*seconds, took_s], [*memcpy, copy_s]
        except MlflashError as problem:
            error = str(problem)
        error = self._tell(error)
        if seconds:
            self._add(figure("killed rank until the next step is saved", seconds, "memcpy", memcpy, 0, "none"))
        if error:
            raise LaunchFailed(error)

    def _recovery(self, memory: Path, end: float) -> tuple[float, float]:
        """Return the seconds of a recovery, and of a memcpy."""
        memory.mkdir(0o700)
        task = {"task": "kept", "rank": 0, "nbytes": self._nbytes, "folder": str(memory / "log"),
                "settings": {"redundancy": "none", "memory": str(memory)}}  # fmt: skip
        command = ["run", "-N1", f"--ranks-per-node={_KEPT}", "--keep-alive", "--spares=1", f"--job={_JOB}",
                   f"--memory={memory}", f"--journal={memory / 'run.jsonl'}", "--max-restarts=0", "--grace=0", "--",
                   sys.executable, "-m", "mlflash.tools.bench_rank", json.dumps(task)]  # fmt: skip
        environment = {name: value for name, value in without_rank(os.environ).items() if not name.startswith("SLURM")}
        with Launch(memory / "log", _KEPT, [sys.executable, "-m", "mlflash", *command], environment) as launch:

            def wait_until(is_so: Callable[[], bool]) -> None:
                while not is_so():
                    if time.monotonic() > end or launch.launcher.poll() is not None:
                        raise launch.failure("the ranks did not go on in time")
                    time.sleep(_LOOK_S)
                    launch.read()

            wait_until(lambda: min(map(launch.last_step, range(_KEPT))) >= _STEPS)
            launch.kill([1])
            wait_until(lambda: all(len(lines) > 1 for lines in launch.starts))
            first = max(lines[1]["step"] for lines in launch.starts) + 1
            wait_until(
                lambda: all(first in steps and steps[first]["time"] > launch.killed_at for steps in launch.steps)
            )
            took_s = max(steps[first]["time"] for steps in launch.steps) - launch.killed_at
            return took_s, statistics.median(lines[0]["memcpy"] for lines in launch.starts)

    def _gpu(self, device: str) -> None:
        """Time saves from the first GPU of the first node."""
        found = self._tell(importlib.util.find_spec("torch") is not None and (device != "cuda" or bool(gpus()["gpus"])))
        if not found:
            raise LaunchFailed("torch sees no GPU on the first node")
        task = {"task": "gpu", "nbytes": self._nbytes, "repetitions": _REPETITIONS, "device": device,
                "settings": {"redundancy": "none"}}  # fmt: skip
        (answer,) = self._launch(task, alone=True)
        samples, nbytes = answer["samples"], answer["nbytes"]
        for name in ("eager", "lazy"):
            beside = samples[f"device to host before {name}"]
            for what in ("stall", "commit"):
                taken = samples[f"{name} {what}"]
                self._add(figure(f"{device}, {name} {what}", taken, "device to host", beside, nbytes, "none"))

    # How ranks are started, and end

    def _launch(self, task: dict[str, Any], lost: Sequence[int] = (), runs_mpi: bool = False,
                alone: bool = False) -> list[dict[str, Any]]:  # fmt: skip
        """Start the ranks of a launch, and return what each one answers. Collective over the world.

        They find what earlier launches of the same measurement left in memory. If some nodes are lost, all ranks are
        killed in the end, and the memory of these nodes is deleted.

        Args:
            lost: numbers of nodes.
            runs_mpi: whether couriers do the task, by their MPI.
            alone: whether rank 0 is the only one.

        Raises LaunchFailed, on all ranks alike: a rank failed, or took too long.
        """
        start = time.monotonic()
        left_s = self._tell(min(_TRIAL_S, self._deadline - time.monotonic()))
        meets = self._tell((own_address(self._between == "one host", os.environ), free_port(), secrets.token_hex(16)))
        started = [] if alone and self._world.rank else [0] if alone else self._mine
        with tempfile.TemporaryDirectory(prefix="launch-", dir=self._top) as folder, contextlib.ExitStack() as stack:
            ranks = [
                stack.enter_context(_Rank(rank, Path(folder), *self._command(rank, task, meets, runs_mpi, alone)))
                for rank in started
            ]
            own: list[Any] = [rank.answer(start + left_s) for rank in ranks]
            answers = [answer for of_process in self._gather(own) for answer in of_process]
            failed = [
                f"{named([number])}: {answer}" for number, answer in enumerate(answers) if isinstance(answer, str)
            ]
            for rank in ranks:
                if lost or failed:
                    rank.kill()
                else:
                    rank.tell_to_end()
            for rank in ranks:
                rank.wait_for_end()
        self._gather(None)  # all ranks have ended
        gone = [self._memory(rank) for rank in started if self._node_of[rank] in lost]
        for memory in gone:
            shutil.rmtree(memory, ignore_errors=True)  # other processes of the node do the same
        if any(self._gather(any(memory.exists() for memory in gone))):
            failed.append("the memory of a node could not be deleted")
        self._longest_s = max(self._longest_s, time.monotonic() - start)
        if failed:
            raise LaunchFailed(failed[0])
        return answers

    def _command(self, rank: int, task: dict[str, Any], meets: tuple[str, int, str], runs_mpi: bool,
                 alone: bool) -> tuple[list[str], dict[str, str]]:  # fmt: skip
        address, port, token = meets
        memory = self._memory(rank)
        memory.mkdir(0o700, exist_ok=True)
        task = {"rank": rank, **task}
        if "settings" in task:
            node = f"node{rank}" if self._is_emulated else ""
            more = {"job": _JOB, "memory": str(memory), "node": node, "strict": True, "timeout_s": _RANK_S}
            task["settings"] = {**task["settings"], **more}
        environment = without_rank(os.environ)
        if not alone:
            environment = as_torchrun(environment, rank, self._size, 0 if self._is_emulated else self._world.local_rank,
                                      address, port)  # fmt: skip
        environment |= {DISABLE: "", TOKEN: token, "MLFLASH_JOB": _JOB, "MLFLASH_MEMORY": str(memory)}
        if self._between == "one host":
            environment["LOCAL_WORLD_SIZE"] = str(1 if alone else self._size)
        program = ["mlflash.tools.run_on_ranks", "-m"] if runs_mpi else []
        return [sys.executable, "-m", *program, "mlflash.tools.bench_rank", json.dumps(task)], environment

    def _memory(self, rank: int) -> Path:
        return self._top / f"node{rank}" if self._is_emulated else self._top / "node"

    # The report

    def _try(self, what: str, measure: Callable[..., None], *arguments: Any) -> None:
        """Measure something, if there is time, and say why it was not. Collective over the world."""
        needs_s, left_s = self._tell((1.5 * self._longest_s, self._deadline - time.monotonic()))
        if needs_s > left_s or left_s <= 0:
            self._not_run(what, f"{show_seconds(max(left_s, 0.0))} were left of --minutes")
            return
        if self._world.rank == 0:
            print(f"{what} ...", file=sys.stderr, flush=True)
        try:
            measure(*arguments)
        except LaunchFailed as error:
            self._not_run(what, str(error))
        for path in self._top.iterdir():  # the next measurement finds nothing in memory
            shutil.rmtree(path, ignore_errors=True)
        self._gather(None)
        self._write()

    def _add(self, made: dict[str, Any]) -> None:
        self.report["figures"].append(made)

    def _not_run(self, what: str, why: str) -> None:
        self.report["not_run"].append({"what": what, "why": self._clean(why)})

    def _clean(self, value: Any) -> Any:
        return value if self._names else redacted(value, self._words)

    def _write(self) -> None:
        """Write the report of rank 0, so that it is there even if a time limit ends the command."""
        if self._world.rank == 0:
            new = self._out.with_name(f".{self._out.name}.new")
            new.write_text(json.dumps(self.report, indent=1) + "\n")
            new.replace(self._out)

    def _gather(self, value: Any) -> list[Any]:
        """Give every process the value of each. Raises DeadlineExceeded: one did not come in time."""
        self._world.start_job(raise_deadline)
        values = self._world.gather(value)
        self._world.end_job()
        return values

    def _tell(self, value: Any) -> Any:
        """Give every process the value of the first one."""
        return self._gather(value)[0]


class _Rank(contextlib.AbstractContextManager["_Rank"]):
    """A rank that was started. Leave the context manager, and it has ended."""

    def __init__(self, rank: int, folder: Path, command: Sequence[str], environment: dict[str, str]):
        self._out, self._log = folder / f"{rank}.out", folder / f"{rank}.log"
        with self._out.open("w") as out, self._log.open("w") as log:
            self._process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=out, stderr=log,
                                             start_new_session=True)  # fmt: skip

    def __exit__(self, *_: object) -> None:
        self.kill()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def answer(self, deadline: float) -> dict[str, Any] | str:
        """Wait for what the rank has measured. If it fails or is late, return why."""
        is_running = True
        while is_running and time.monotonic() < deadline:
            is_running = self._process.poll() is None
            lines = self._out.read_text().splitlines(keepends=True)
            for line in lines:
                if line.startswith(RESULT) and line.endswith("\n"):
                    found: dict[str, Any] = json.loads(line.removeprefix(RESULT))
                    return found
            time.sleep(_LOOK_S)
        return "it took too long" if is_running else last_words(self._log.read_text(errors="replace"))

    def tell_to_end(self) -> None:
        """Let it close its Checkpointer, which is collective over the ranks."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()

    def wait_for_end(self) -> None:
        """Wait until it has ended, but not for long."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)

    def kill(self) -> None:
        """Kill it by SIGKILL."""
        self._process.kill()
        self._process.wait()
