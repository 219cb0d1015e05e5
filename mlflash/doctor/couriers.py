"""Couriers: which kind a job would have, on which cores they would run, and which of them are on this node."""

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
_SOON_S = 4  # within which a courier ends whose trainer has


def kind(given: Config, env: Mapping[str, str]) -> Finding:
    """Say what a Checkpointer of these settings has as its courier, and why."""
    why = f"{_ENV}={env[_ENV]}" if env.get(_ENV) else "as by default"
    if given.courier == "process":
        return fine("courier", "a process beside each trainer ({why}), and a thread where comm= is given", why=why)
    if given.courier == "auto":
        text = "a process beside each trainer ({why}); a thread where comm=, the program or its MPI wants one"
        return fine("courier", text, why=why)
    return fine("courier", "a thread of each trainer ({why})", why=why)


def cores(world: World, given: Config, env: Mapping[str, str]) -> Iterator[Finding]:
    """Say which cores couriers would get. Collective over the world; of whole nodes.

    Args:
        world: all ranks, or one without MPI.
        given: settings.
        env: the environment, ``os.environ`` as a rule.
    """
    threads = env.get("OMP_NUM_THREADS", "").split(",")[0]
    mine = courier_cores.own_seat(env), int(threads) if threads.isdigit() else None
    told = [mine] if world.world is None else world.gather(mine, world.node)
    if world.local_rank == 0 and given.courier != "thread":
        yield judge_cores(given.courier_cpus, [seat for seat, _ in told], [number for _, number in told])


def judge_cores(asked: str, seats: Sequence[Seat], threads: Sequence[int | None], domains: Domains | None = None
                ) -> Finding:  # fmt: skip
    """Say which cores the couriers of a host would get.

    Args:
        asked: see `courier_cores.choose`.
        seats: of its ranks.
        threads: of each trainer, as OMP_NUM_THREADS says; None: it does not.
        domains: of the host; looked up if None.
    """
    check = "courier cores"
    got = [courier_cores.choose(asked, seats, mine, domains) for mine in range(len(seats))]
    taken = frozenset().union(*(seat.trains_on for seat in seats))
    if all(cores is not None and not cores & taken for cores in got):
        of_all = frozenset().union(*(cores or () for cores in got))
        return fine(check, "{cores}, where no trainer runs", cores=to_list(of_all))
    busy = sum(len(seat.trains_on) if number is None else number for seat, number in zip(seats, threads, strict=True))
    free = len(taken) - busy
    text = f"those of the trainers ({{cores}}): {asked} finds no others"
    if free >= len(seats):
        return fine(check, text + f", of which {free} train nothing", cores=to_list(taken))
    return warning(check, text + ", and each has a thread that trains",
                   "leave cores to couriers: fewer OMP_NUM_THREADS, or ranks bound to fewer cores than the job has",
                   cores=to_list(taken))  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Running:
    """A zygote or a courier of this user.

    Attributes:
        pid: of it.
        parent: of it.
        trainer: of both; a zygote's parent, as long as that lives.
        jobs: whose lock it holds.
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
    """The jobs whose lock file a process has open."""
    files = []
    for fd in (process / "fd").iterdir():
        try:
            files.append(Path(os.readlink(fd)))
        except OSError:
            continue
    locks = [file.parent for file in files if file.name == "lock" and any("mlflash-" in part for part in file.parts)]
    return tuple(sorted({path.parent.name if path.name.startswith("node") else path.name for path in locks}))


def judge_running(found: Sequence[Running]) -> Iterator[Finding]:
    """Say which couriers are on a node, and which of them have lost their trainer.

    Args:
        found: what `running` gives.
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
    text = "left over, as their trainers have ended: {pids}" + (", with the lock of {jobs}" if jobs else "")
    values = {"pids": _some(pids)} | ({"jobs": ", ".join(jobs)} if jobs else {})
    yield warning(check, text, f"they end within {_SOON_S} s, when what was saved is committed; else kill -9 {{pids}}",
                  **values)  # fmt: skip


def _some(pids: Sequence[int]) -> str:
    return " ".join(map(str, pids[:_NAMED])) + (" ..." if len(pids) > _NAMED else "")
