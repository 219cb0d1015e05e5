"""Traps at the named points of mlflash: where a rank steps into one, it dies, or waits, or its node goes.

A rank is its trainer and its courier, and the agent that has forked the courier if it has forked no other.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from processes import is_agent, parent_of, runs, send, started_by
from waiting import hang, take, until

from mlflash import crash_points
from mlflash.memory.process_names import trainer_of

OUT = Path(os.environ["OUT"])
_RANK = "MLFLASH_TEST_RANK"  # in the environment of couriers


def _starts() -> list[dict[str, Any]]:
    return [json.loads(file.read_text().splitlines()[0]) for file in OUT.glob("rank*.jsonl")]


def my_rank() -> int:
    if _RANK in os.environ:
        return int(os.environ[_RANK])
    (rank,) = (record["rank"] for record in _starts() if record["pid"] == os.getpid())
    return int(rank)


def _trainers(ranks: Collection[int]) -> set[int]:
    return {record["pid"] for record in _starts() if record["rank"] in ranks}


def _couriers_of(trainers: set[int]) -> set[int]:
    return {int(path.name) for path in Path("/proc").glob("[0-9]*") if trainer_of(path) in trainers}


def _with_agents(couriers: set[int]) -> set[int]:
    """Couriers, and the agents that have no others."""
    agents = {parent_of(pid) for pid in couriers} - {0}
    return couriers | {pid for pid in agents if is_agent(pid) and started_by({pid}) <= couriers}


def _kill(pids: set[int]) -> None:
    """Kill processes, of which this may be one; with its agent a courier dies, too."""
    send(signal.SIGKILL, sorted(pids, key=lambda pid: (pid == os.getpid(), pid == os.getppid())))


def kill_rank() -> None:
    trainers = _trainers([my_rank()])
    _kill(trainers | _with_agents(_couriers_of(trainers)))


def kill_courier() -> None:
    _kill(_couriers_of(_trainers([my_rank()])))


def kill_my_node(wipe: bool) -> None:
    """Die with all ranks of this node and what they have started, and with its memory."""
    per_node = int(os.environ["RANKS_PER_NODE"])
    node = my_rank() // per_node
    trainers = _trainers(range(node * per_node, (node + 1) * per_node))
    if wipe:
        # Stopped, they make no new file in what is deleted here, and their launcher does not yet kill this process.
        pids = (trainers | _with_agents(_couriers_of(trainers))) - {os.getpid()}
        send(signal.SIGSTOP, pids)
        until(lambda: not any(runs(pid) for pid in pids), "all ranks of this node are stopped")
        shutil.rmtree(Path(os.environ["MLFLASH_MEMORY"], f"mlflash-{os.getuid()}", os.environ["MLFLASH_JOB"]))
    _kill(trainers | _with_agents(_couriers_of(trainers)) | started_by(trainers))


def fill_memory() -> None:
    with Path(os.environ["MLFLASH_MEMORY"]).with_name("filler").open("wb") as file:
        at, size = 0, 1 << 30
        while size >= 4096:
            try:
                os.posix_fallocate(file.fileno(), at, size)
                at += size
            except OSError:
                size //= 2


def fail() -> None:
    """Raise an error that is none of mlflash's, nor of MPI's."""
    raise RuntimeError("a trap in the courier")


def fail_as_mpi() -> None:
    from mpi4py import MPI

    raise MPI.Exception(MPI.ERR_OTHER)


def vanish() -> None:
    """Let the directory that is drained to disappear; it comes back where somebody renames it."""
    directory = os.environ["FAULTY_ROOT"]
    os.rename(directory, directory + ".away")


ACTIONS: dict[str, Callable[[], None]] = {
    "rank": kill_rank,
    "trainer": lambda: _kill(_trainers([my_rank()])),
    "courier": kill_courier,
    "node": lambda: kill_my_node(wipe=False),
    "wipe": lambda: kill_my_node(wipe=True),
    "wait": hang,
    "stop": lambda: send(signal.SIGSTOP, [os.getpid()]),
    "pause": lambda: take(0.5),
    "hold": lambda: until((OUT / "go on").exists, "the test to say go on"),
    "fill": fill_memory,
    "fail": fail,
    "mpi fails": fail_as_mpi,
    "vanish": vanish,
}


class Trap:
    """Something that happens when a rank has passed some points in order.

    What was passed is counted in a file, which a trainer and its courier share.

    Args:
        path: names of points; what happens does so at the last of them.
        action: one of `ACTIONS`.
        rank: who steps into it; -1: whoever comes first, and only one.
        passed: the file.
    """

    def __init__(self, path: list[str], action: str, rank: int, passed: Path):
        unknown = set(path) - set(crash_points.POINTS)
        assert not unknown, unknown
        self._path, self._action, self._rank, self._passed = path, action, rank, passed

    def reached(self, point: str) -> None:
        if point in self._path and self._is_next(point) and self._is_first():
            ACTIONS[self._action]()

    def _is_next(self, point: str) -> bool:
        """Go on if it is the next one; whether it was the last one."""
        with self._passed.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            at = os.fstat(file.fileno()).st_size
            if at == len(self._path) or self._path[at] != point:
                return False
            file.write(b".")
            return at + 1 == len(self._path)

    def _is_first(self) -> bool:
        try:
            (OUT / f"sprung{self._rank}").touch(exist_ok=self._rank >= 0)
        except FileExistsError:
            return False
        return True


def set_traps(specs: Sequence[dict[str, Any]], rank: int) -> None:
    """Set the traps that this rank may step into.

    The first call comes before it has a courier, if only with no traps: the courier is armed as it starts, and finds
    those that are set later.
    """
    if specs:
        new = OUT / f"new-traps-{rank}"
        new.write_text(json.dumps([*specs]))
        new.rename(_traps_of(rank))
    os.environ[_RANK] = str(rank)
    os.environ.setdefault("MLFLASH_TEST_ARMS", "traps")
    arm()


def _traps_of(rank: int) -> Path:
    return OUT / f"traps-{rank}"


def arm() -> None:
    """Arm the traps that this rank has, and will have."""
    crash_points.arm(armed())


def armed() -> Callable[[str], None]:
    """What `arm` arms."""
    me = my_rank()
    traps: list[Trap] = []

    def reached(point: str) -> None:
        if not traps and _traps_of(me).exists():
            for number, spec in enumerate(json.loads(_traps_of(me).read_text())):
                if (rank := spec.get("rank", -1)) in (-1, me):
                    traps.append(Trap(spec["path"], spec["action"], rank, OUT / f"passed-{me}-{number}"))
        for trap in traps:
            trap.reached(point)

    return reached
