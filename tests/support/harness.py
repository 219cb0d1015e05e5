"""Start real jobs on this machine, kill them, and read what their ranks wrote down."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from processes import described, free_port, left_here, runs, send, started_by, state, uses, with_variable
from waiting import PATIENCE_S, until

from mlflash.launch import courier_mpi
from mlflash.run.processes import mpiexec, signal_group, spawn

SUPPORT = Path(__file__).parent
TESTS = SUPPORT.parent
UID = os.getuid()
Env = dict[str, str] | None
LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node={}"],
    "accelerate": ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes={}", "--num_machines=1",
                   "--mixed_precision=no", "--dynamo_backend=no", "--gpu_ids=all", "--main_process_port=0"],
    "deepspeed": ["-m", "deepspeed.launcher.runner", "--num_gpus={}", "--no_local_rank"],
}  # fmt: skip
"""Launchers that have no MPI, and how each starts so many ranks, as words for Python."""
_LOOK_S = 0.1  # for a rank that has died
_LEFT_S = 2  # for mpiexec to end after its ranks; what they have started is killed then, but nothing of mpiexec's own


@contextlib.contextmanager
def own_memory() -> Iterator[Path]:
    """A directory of our own in /dev/shm, removed afterwards, with the jobs in it, also when its test fails."""
    path = Path(tempfile.mkdtemp(prefix="mlflash-test-", dir="/dev/shm"))
    try:
        yield path
    finally:
        for launch in [launch for launch in live if launch.out.is_relative_to(path)]:  # its test ran out of time
            launch.kill()
        orphans = with_variable(f"\0OUT={path}/")  # couriers that outlive their trainers
        send(signal.SIGKILL, orphans)
        until(lambda: not any(map(runs, orphans)), "the end of what outlived its trainers")
        until(lambda: not [pid for pid in left_here() if uses(pid, path)], "the end of those that remove files")
        shutil.rmtree(path)


@dataclasses.dataclass
class Result:
    returncode: int
    log: str
    records: list[dict[str, Any]]  # what the ranks wrote, in no order

    @property
    def with_mpi(self) -> list[bool]:
        """For each rank that came to its end, whether it has loaded MPI, which only its courier is to do."""
        return [record["mpi"] for record in self.of("libraries")]

    def of(self, event: str) -> list[dict[str, Any]]:
        return sorted((r for r in self.records if r["event"] == event), key=lambda r: r["rank"])


class Cluster:
    """Emulated nodes on this machine, in a directory of a memory file system, and their jobs, one after the other."""

    def __init__(self, root: Path, ranks_per_node: int = 1, job: str = "j", transport: str = "p2p",
                 out: Path | None = None):  # fmt: skip
        self.root, self.out = root, out or root
        self.ranks_per_node = ranks_per_node
        self.job = job
        self.transport = transport
        self.launches = 0

    def node(self, k: int) -> Path:
        return self.root / f"node{k}" / f"mlflash-{UID}" / self.job

    def wipe(self, *nodes: int) -> None:
        for k in nodes:
            shutil.rmtree(self.node(k))

    def move(self, places: dict[int, int]) -> None:
        """Let node k's memory belong to node ``places[k]``: the ranks sit on other nodes than before."""
        for k in places:
            self.node(k).rename(self.node(k).with_name(f"moving{k}"))
        for k, to in places.items():
            self.node(k).with_name(f"moving{k}").rename(self.node(to))

    def slot_files(self) -> list[Path]:
        return sorted(self.root.glob(f"node*/mlflash-{UID}/{self.job}/slot-*"))

    def start(self, ranks: int, script: str, *args: str, env: Env = None, before: Sequence[str] = (),
              launcher: str = "mpiexec") -> Launch:  # fmt: skip
        """Start a script, by its path in tests/, on so many ranks.

        Args:
            before: a command that runs mpiexec.
            launcher: mpiexec, or one of `LAUNCHERS`.
        """
        self.launches += 1
        out = self.out / f"out-{self.job}-{self.launches}"
        out.mkdir()
        environment = {
            "MLFLASH_MEMORY": str(self.root),
            "MLFLASH_JOB": self.job,
            "RANKS_PER_NODE": str(self.ranks_per_node),
            "MLFLASH_TRANSPORT": self.transport,
            "OUT": str(out),
            "TMPDIR": str(out),  # a killed mpiexec leaves files that the next one with its process number trips over
            "PYTHONWARNINGS": "error",
            **(env or {}),
        }
        on_node = [str(SUPPORT / "on_node.py"), sys.executable, str(TESTS / script), *args]
        if launcher == "mpiexec":
            command, environment = mpiexec(ranks, [sys.executable, *on_node], environment)
        else:
            words = [word.format(ranks) for word in LAUNCHERS[launcher]]
            command = [sys.executable, *words, *on_node]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        return Launch([*before, *command], environment, out)

    def run(self, ranks: int, script: str, *args: str, timeout: float = PATIENCE_S, env: Env = None,
            launcher: str = "mpiexec") -> Result:  # fmt: skip
        return self.start(ranks, script, *args, env=env, launcher=launcher).wait(timeout)

    def begin(self, ranks: int, env: Env = None, before: Sequence[str] = (), **spec: Any) -> Launch:
        """Start support/worker.py; ``spec`` is its program, by default ``train``, and what that takes."""
        return self.start(ranks, "support/worker.py", json.dumps(spec), env=env, before=before)

    def train(self, ranks: int, env: Env = None, **spec: Any) -> Result:
        return self.begin(ranks, env, **spec).wait()


def read_records(folder: Path, event: str = "") -> list[dict[str, Any]]:
    """What ranks have written so far, of one event or of all."""
    found = []
    for path in sorted(folder.glob("rank*.jsonl")):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):  # a rank died while it wrote
                found.append(json.loads(line))
    return [record for record in found if event in ("", record["event"])]


class PlainRanks:
    """Processes that no launcher has started: each only has what torchrun would tell it. A ``with`` block kills them.

    Args:
        out: folder that gets their records and a log.
        size: how many.
        words: what each of them runs.
        env: their environment, in which {rank} is the rank; None: that of this process.
    """

    def __init__(self, out: Path, size: int, words: Sequence[str], env: Env = None):
        self.out = out
        names = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "RANK": "{rank}",
                 "OUT": str(out), "OMP_NUM_THREADS": "1", **(os.environ if env is None else env)}  # fmt: skip
        with (out / "log").open("ab") as log:
            self.processes = [
                subprocess.Popen(words, stdout=log, stderr=log,
                                 env={name: value.replace("{rank}", str(rank)) for name, value in names.items()})
                for rank in range(size)
            ]  # fmt: skip

    @property
    def log(self) -> str:
        return (self.out / "log").read_text()

    def records(self, event: str) -> list[dict[str, Any]]:
        return read_records(self.out, event)

    def wait(self) -> list[int]:
        return [process.wait(PATIENCE_S) for process in self.processes]

    def __enter__(self) -> PlainRanks:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait(PATIENCE_S)


live: set[Launch] = set()


class Launch:
    def __init__(self, command: list[str], env: dict[str, str], out: Path):
        self.out = out
        self._segments = segments()
        with (out / "log").open("a") as log:
            self._process = spawn(command, env=env, stdout=log, stderr=log)
        live.add(self)

    def records(self, event: str = "") -> list[dict[str, Any]]:
        return read_records(self.out, event)

    def wait_for(self, event: str, count: int, timeout: float = PATIENCE_S) -> list[dict[str, Any]]:
        """Wait until so many records of an event are there."""

        def is_decided() -> bool:
            ended = self._process.poll() is not None  # asked first: what it noted before it ended counts
            return len(self.records(event)) >= count or ended

        with contextlib.suppress(AssertionError):
            until(is_decided, event, timeout)
        records = self.records(event)
        if len(records) >= count:
            return records
        state = self._state()
        self.kill()
        raise AssertionError(f"no {count} x {event!r}:\n{state}")

    def pids(self) -> dict[int, int]:
        return {r["rank"]: r["pid"] for r in self.records("start")}

    def signal(self, ranks: list[int], number: int = signal.SIGKILL) -> None:
        """Send a signal to ranks, as nearly at once as can be."""
        pids = self.pids()
        send(number, [pids[rank] for rank in ranks])

    def running(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """Kill everything that this launch started; on return its ranks hold no lock any more."""
        pids = self.pids().values()
        send(signal.SIGKILL, pids)
        signal_group(self._process, signal.SIGKILL)
        self._process.wait(30)
        self._kill_what_is_left()
        until(lambda: not any(map(runs, pids)), "the end of the ranks that were killed")
        live.discard(self)
        remove_segments(self._segments)

    def stop(self, rank: int) -> None:
        """Stop a rank; when this returns none of its threads runs any more."""
        self.signal([rank], signal.SIGSTOP)
        pid = self.pids()[rank]
        until(lambda: not runs(pid), f"rank {rank} to stop")

    def wait(self, timeout: float = PATIENCE_S) -> Result:
        """Wait for the end; a job that hangs is killed and fails the test."""
        end, were_dead = time.monotonic() + timeout, False
        self._kill_beside_the_dead(end)
        while True:
            try:
                self._process.wait(min(_LEFT_S, max(0, end - time.monotonic())))
                break
            except subprocess.TimeoutExpired:
                pass
            if time.monotonic() >= end:
                state = self._state()
                self.kill()
                raise AssertionError(f"the job still ran after {timeout} s:\n{state}")
            are_dead = bool(self.pids()) and not self._lives()
            if were_dead and are_dead:
                self._kill_what_is_left()
            were_dead = are_dead
        # mpiexec may be gone before its ranks are.
        until(lambda: not self._lives(), "the ranks end after mpiexec")
        live.discard(self)
        remove_segments(self._segments)
        return Result(self._process.returncode, self._text(), self.records())

    def _kill_beside_the_dead(self, end: float) -> None:
        """Do what a launcher does that sees a rank die; hydra does not see the death of each that has no MPI."""
        while self.running() and time.monotonic() < end:
            pids = self.pids().values()
            if any(map(_has_died, pids)):
                send(signal.SIGKILL, pids)
                return
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_LOOK_S)

    def _lives(self) -> bool:
        return any(map(_alive, self.pids().values()))

    def _kill_what_is_left(self) -> None:
        """Kill what the ranks have started; hydra waits for the end of all that could still print.

        They are no descendants of mpiexec any more. Those that are only need more time on a busy machine.
        """
        send(signal.SIGKILL, self._started() - {self._process.pid, *started_by({self._process.pid})})

    def _started(self) -> set[int]:
        """All processes of this launch, whoever is their parent now."""
        return with_variable(f"\0OUT={self.out}\0")

    def _text(self) -> str:
        return (self.out / "log").read_text()[-60_000:]

    def _state(self) -> str:
        """What is known of a job that hangs: what it printed, what each rank noted last, and its processes."""
        noted = [f"rank {rank}: {[r for r in self.records() if r['rank'] == rank][-3:]}" for rank in self.pids()]
        processes = [f"{described(pid)}: {_state_of(pid)}" for pid in sorted(self._started())]
        return "\n".join([self._text(), *noted, *processes])


def _state_of(pid: int) -> str:
    try:
        return f"{state(Path(f'/proc/{pid}/stat'))} in {Path(f'/proc/{pid}/wchan').read_text()}"
    except OSError:
        return "it has ended"


def segments() -> set[str]:
    """Shared memory that MPI has made."""
    return {path.name for path in Path("/dev/shm").iterdir() if courier_mpi.is_segment(path.name)}


def remove_segments(before: set[str]) -> None:
    """Delete what MPI has left since, because its processes were killed; nothing that is still mapped."""
    courier_mpi.remove_unmapped(segments() - before)


def _has_died(pid: int) -> bool:
    """Whether a process has ended otherwise than well, and its launcher has not looked."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return fields[0] == "Z" and fields[-1] != "0"
    return False


def _alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return state(Path(f"/proc/{pid}/stat")) != "Z"
    return False


class Memories:
    """What jobs left in memory that were killed: made once for each kind of job, and copied for each test."""

    def __init__(self, root: Path):
        self._root = root
        self._made: dict[str, Path] = {}

    def give(self, cluster: Cluster, ranks: int, step: int, env: Env, spec: dict[str, Any]) -> None:
        """Copy into an empty cluster what such a job left."""
        kind = json.dumps([ranks, cluster.ranks_per_node, cluster.job, cluster.transport, step, env, spec])
        if kind not in self._made:
            root = self._root / str(len(self._made))
            root.mkdir()
            first = Cluster(root, cluster.ranks_per_node, cluster.job, cluster.transport)
            _train_and_die(first, ranks, step, env, spec)
            self._made[kind] = root
        for node in self._made[kind].glob("node*"):
            shutil.copytree(node, cluster.root / node.name)


memories: Memories | None = None  # of this session of pytest, see faults/conftest.py


def train_and_die(cluster: Cluster, ranks: int, step: int, env: Env = None, **spec: Any) -> None:
    """Train up to a committed step, then every process dies at once.

    A job that was killed alike before is not started again, where the cluster is empty: its memory is copied.
    """
    writes_elsewhere = "directory" in spec.get("options", {})
    if memories is None or writes_elsewhere or cluster.slot_files():
        _train_and_die(cluster, ranks, step, env, spec)
    else:
        memories.give(cluster, ranks, step, env, spec)


def _train_and_die(cluster: Cluster, ranks: int, step: int, env: Env, spec: dict[str, Any]) -> None:
    spec = {**spec, "last": step, "die_at": step, "die": "all"}
    result = cluster.train(ranks, env, **spec)
    assert [r["step"] for r in result.of("committed")].count(step) == ranks, result.log
    assert not result.of("end")


def assert_unrestorable(result: Result, ranks: int, **reasons: str) -> None:
    """All ranks heard why no checkpoint can be used (``step_3=`` is a pattern), and no state was changed."""
    told = result.of("unrestorable")
    assert [r["rank"] for r in told] == list(range(ranks)) and not result.of("restored"), result.log
    assert all((r["reasons"], r["wrong"]) == (told[0]["reasons"], []) for r in told), result.log
    assert {f"step_{step}" for step in told[0]["reasons"]} == reasons.keys(), told[0]["text"]
    for step, why in told[0]["reasons"].items():
        assert re.search(reasons[f"step_{step}"], why) and why in told[0]["text"], told[0]["text"]


def assert_restored(result: Result, ranks: int, step: int | None) -> None:
    restored = result.of("restored")
    assert [r["step"] for r in restored] == [step] * ranks, result.log
    assert [r["wrong"] for r in restored] == [[]] * ranks
    assert len(result.of("end")) == ranks, result.log
