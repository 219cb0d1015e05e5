"""Which cores a courier runs on: those that no trainer of its host runs on, where there are any.

Cores are numbered as the kernel does: one that runs two threads at a time has two numbers, its siblings. What a trainer
may run on is the mask of its main thread, and what it could ask for is what its cgroup lets it have; both are known of
all ranks of a host. Where nothing is free, as all trainers are bound to all that there is or none is bound at all, a
courier keeps its trainer's mask.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

AUTO, INHERIT = "auto", "inherit"
_NODES, _CPUS = Path("/sys/devices/system/node"), Path("/sys/devices/system/cpu")
_MOST = 1 << 13  # a larger number than any kernel gives to a core
_LIST = re.compile(r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*")
Cores = frozenset[int]


@dataclasses.dataclass(frozen=True)
class Seat:
    """What a rank may run on.

    Attributes:
        trains_on: the cores of its trainer.
        may_have: those that it could ask for.
    """

    trains_on: Cores
    may_have: Cores

    def to_text(self) -> str:
        """As a text, for other ranks."""
        return f"{to_list(self.trains_on)} {to_list(self.may_have)}"

    @classmethod
    def from_text(cls, text: str) -> Seat:
        """Read it.

        Raises:
            ValueError: it is none.
        """
        trains_on, may_have = text.split(" ")
        return cls(from_list(trains_on), from_list(may_have))


@dataclasses.dataclass(frozen=True)
class Domains:
    """How the cores of this host lie together.

    Attributes:
        numa: gives the cores that are as near to memory as some core.
        siblings: gives the numbers that are the same core as some number, with that.
    """

    numa: Callable[[int], Cores]
    siblings: Callable[[int], Cores]


def from_list(text: str) -> Cores:
    """Read a list as the kernel writes it: "0-3,8".

    Raises:
        ValueError: it is none.
    """
    if not _LIST.fullmatch(text.strip()):
        raise ValueError(f"{text[:80]!r} is no list of cores, such as 0-3,8")
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    if not found or max(found) >= _MOST:
        raise ValueError(f"{text[:80]!r} is no list of cores, such as 0-3,8")
    return frozenset(found)


def to_list(cores: Iterable[int]) -> str:
    """Write it: {0, 1, 2, 8} → "0-2,8"."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and core == parts[-1][-1] + 1:
            parts[-1][1:] = [core]
        else:
            parts.append([core])
    return ",".join("-".join(map(str, part)) for part in parts)


def own_seat(environment: Mapping[str, str]) -> Seat:
    """Look what this process may run on. Not collective."""
    trains_on = frozenset(os.sched_getaffinity(os.getpid()))  # its main thread: others may be bound by themselves
    may_have = _could_have()
    told = environment.get("SLURM_CPUS_ON_NODE", "")
    if told.isdigit() and int(told) < len(may_have):  # Slurm does not confine its jobs: the others may be other jobs'
        may_have = trains_on
    return Seat(trains_on, may_have | trains_on)


def _could_have() -> Cores:
    """The cores that the cgroup of this process leaves it, whatever its mask is."""
    found: list[Cores] = []

    def ask() -> None:  # on a thread that ends here, as the kernel has to be asked by taking them
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, range(_MOST))
        found.append(frozenset(os.sched_getaffinity(0)))

    thread = threading.Thread(target=ask, name="mlflash-cores")
    thread.start()
    thread.join()
    return found[0]


def choose(asked: str, seats: Sequence[Seat], mine: int, domains: Domains | None = None) -> Cores | None:
    """Choose the cores of a courier; all ranks of a host come to different ones, or share. Not collective.

    Args:
        asked: "auto", "inherit", or a list such as "0-3,8", which the couriers of a host share.
        seats: of all ranks of the host, in the order of ranks.
        mine: which of them it is.
        domains: of this host; looked up if None.

    Returns:
        Cores; None: those of its trainer, as they are.
    """
    if asked == INHERIT:
        return None
    domains = domains or here()
    free = [_free(asked, seat, seats, domains) for seat in seats]
    near = [_near(cores, seat, domains) for cores, seat in zip(free, seats, strict=True)]
    if not near[mine]:
        return None
    sharing = [number for number, cores in enumerate(near) if cores == near[mine]]
    return _part(near[mine], sharing.index(mine), len(sharing), domains)


def choose_among(asked: str, told: Mapping[str, str], rank: str) -> Cores | None:
    """Choose as `choose` does, among what ranks of a host have told of their seats, by rank. Not collective.

    Raises:
        ValueError: something was told that is no seat, or nothing of this rank.
    """
    ranks = sorted(told, key=int)
    return choose(asked, [Seat.from_text(told[one]) for one in ranks], ranks.index(rank))


def _free(asked: str, seat: Seat, seats: Sequence[Seat], domains: Domains) -> Cores:
    if asked != AUTO:
        return from_list(asked) & seat.may_have
    taken: Cores = frozenset().union(*(one.trains_on for one in seats))
    free = seat.may_have - taken
    whole = frozenset(core for core in free if not domains.siblings(core) & taken)
    return whole or free  # half of a core whose other half trains is better than what trains itself


def _near(cores: Cores, seat: Seat, domains: Domains) -> Cores:
    """Of some cores those that are as near to the trainer's memory as the trainer is; all where there are none."""
    own: Cores = frozenset().union(*(domains.numa(core) for core in seat.trains_on))
    return cores & own or cores


def _part(cores: Cores, number: int, parts: int, domains: Domains) -> Cores:
    """Give one of so many equal parts, siblings together; all of it where there are not enough for a core each."""
    whole = sorted({tuple(sorted(domains.siblings(core) & cores)) or (core,) for core in cores})
    if len(whole) < parts:
        return cores
    return frozenset(
        core for both in whole[number * len(whole) // parts : (number + 1) * len(whole) // parts] for core in both
    )


def here() -> Domains:
    """How the cores of this host lie, as far as the kernel says. Not collective."""
    nodes = [cores for path in sorted(_NODES.glob("node[0-9]*/cpulist")) if (cores := _read(path))]
    numa = {core: cores for cores in nodes for core in cores}
    siblings: dict[int, Cores] = {}

    def siblings_of(core: int) -> Cores:
        if core not in siblings:
            siblings[core] = _read(_CPUS / f"cpu{core}/topology/thread_siblings_list") | {core}
        return siblings[core]

    return Domains(lambda core: numa.get(core, frozenset()), siblings_of)


def _read(path: Path) -> Cores:
    try:
        return from_list(path.read_text())
    except (OSError, ValueError):  # a node that has memory only, or a kernel that does not say
        return frozenset()
