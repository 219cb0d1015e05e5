"""Couriers: which kind a job would have, on which cores they would run, and which ones run on this node."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ..config import Config
from ..memory.courier_process import parent_and_trainer
from ..mpi.world import World
from ..wireup import courier_cores
from ..wireup.courier_cores import Domains, Seat, to_list
from .findings import Finding, fine, warning

_ENV = "MLFLASH_COURIER"
_NAMED = 4
_SOON_S = 4  # a courier ends within this time after its trainer


def kind(given: Config, env: Mapping[str, str]) -> Finding:
    """Say which kind of courier a Checkpointer with these settings has, and why."""
    why = f"{_ENV}={env[_ENV]}" if env.get(_ENV) else "as by default"
    if given.courier == "process":
        return fine("courier", "a process for each trainer ({why}), and a thread if comm= is given", why=why)
    if given.courier == "auto":
        text = "a process for each trainer ({why}); a thread if comm=, the program or its MPI needs one"
        return fine("courier", text, why=why)
    return fine("courier", "a thread in each trainer ({why})", why=why)


def cores(world: World, given: Config, env: Mapping[str, str]) -> Iterator[Finding]:
    """Say which cores couriers would get. Collective over the world; for whole nodes.

    Args:
        world: all ranks, or one without MPI.
        given: settings.
        env: the environment, ``os.environ`` as a rule.
    """
    threads = env.get("OMP_NUM_THREADS", "").split(",")[0]
    mine = courier_cores.own_seat(env), int(threads) if threads.isdigit() else None
    told = [mine] if world.world is None else world.gather(mine, world.node)
    if world.local_rank == 0 and given.courier != "thread":
        yield judge_cores([seat for seat, _ in told], [number for _, number in told])


def judge_cores(seats: Sequence[Seat], threads: Sequence[int | None], domains: Domains | None = None) -> Finding:
    """Say which cores the couriers of a host would get.

    Args:
        seats: the seats of its ranks.
        threads: number of threads of each trainer, from OMP_NUM_THREADS. None: unknown.
        domains: domains of the host. None: look them up.
    """
    check = "courier cores"
    got = [courier_cores.choose(seats, mine, domains) for mine in range(len(seats))]
    taken = frozenset().union(*(seat.trains_on for seat in seats))
    if all(cores is not None and not cores & taken for cores in got):
        of_all = frozenset().union(*(cores or () for cores in got))
        return fine(check, "{cores}, on which no trainer runs", cores=to_list(of_all))
    busy = sum(len(seat.trains_on) if number is None else number for seat, number in zip(seats, threads, strict=True))
    free = len(taken) - busy
    text = "the cores of the trainers ({cores}), because the job has no others"
    if free >= len(seats):
        return fine(check, text + f"; {free} of them have no training thread", cores=to_list(taken))
    return warning(check, text + "; training threads use all of them",
                   "leave cores for couriers: lower OMP_NUM_THREADS, or bind ranks to fewer cores than the job has",
                   cores=to_list(taken))  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Running:
    """A zygote (the process that forks couriers) or a courier of this user.

    Attributes:
        pid: its process ID.
        parent: process ID of its parent.
        trainer: process ID of its trainer. This is a zygote's parent while the trainer lives.
        jobs: the jobs that it holds the lock of.
    """

    pid: int
    parent: int
    trainer: int
    jobs: tuple[str, ...] = ()


def running(proc: Path = Path("/proc")) -> list[Running]:
    """List the zygotes and couriers of this user on this node. Not collective."""
    found = []
    for path in proc.glob("[0-9]*"):
        try:
            its = parent_and_trainer(path)
            if its is not None and path.stat().st_uid == os.getuid():
                found.append(Running(int(path.name), *its, _locked_by(path)))
        except OSError:  # it has just ended
            continue
    return sorted(found, key=lambda one: one.pid)


def _locked_by(process: Path) -> tuple[str, ...]:
    """Return the jobs whose lock file a process has open."""
    files = []
    for fd in (process / "fd").iterdir():
        try:
            files.append(Path(os.readlink(fd)))
        except OSError:
            continue
    locks = [file.parent for file in files if file.name == "lock" and any("mlflash-" in part for part in file.parts)]
    return tuple(sorted({path.parent.name if path.name.startswith("node") else path.name for path in locks}))


def judge_running(found: Sequence[Running]) -> Iterator[Finding]:
    """Say which couriers run on a node, and which of them have lost their trainer.

    Args:
        found: the result of `running`.
    """
    check = "couriers here"
    zygotes = {one.pid for one in found if one.parent not in {other.pid for other in found}}
    couriers = [one for one in found if one.pid not in zygotes]
    left = {one.pid for one in found if one.pid in zygotes and one.parent != one.trainer}
    if found and not left:
        yield fine(check, "couriers run, each with its trainer: {couriers}", couriers=len(couriers))
    if not left:
        return
    orphans = [one for one in couriers if one.parent in left]
    jobs = sorted({job for one in orphans for job in one.jobs})
    pids = sorted(left | {one.pid for one in orphans})
    text = "processes {pids} remain, but their trainers have ended" + ("; they lock {jobs}" if jobs else "")
    values = {"pids": _some(pids)} | ({"jobs": ", ".join(jobs)} if jobs else {})
    yield warning(check, text, f"they end within {_SOON_S} s after they have committed the last save; if not: kill -9 "
                  "{pids}", **values)  # fmt: skip


def _some(pids: Sequence[int]) -> str:
    return " ".join(map(str, pids[:_NAMED])) + (" ..." if len(pids) > _NAMED else "")
