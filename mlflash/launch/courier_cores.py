"""Chooses the cores of a courier: cores on which no trainer of its host runs, if there are any.

Cores have the numbers of the kernel: a core that runs two threads at a time has two numbers, called siblings. The mask
of a trainer's main thread says where the trainer runs, and its cgroup says which cores it could ask for. Both are known
for all ranks of a host. If no core is free, because the trainers are bound to all cores or are not bound at all, a
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

from ..text import runs

_NODES, _CPUS = Path("/sys/devices/system/node"), Path("/sys/devices/system/cpu")
_MOST = 1 << 13  # larger than the number of any core
_LIST = re.compile(r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*")
Cores = frozenset[int]


@dataclasses.dataclass(frozen=True)
class RankCores:
    """The cores of a rank."""

    trains_on: Cores  # the cores of its trainer
    may_have: Cores  # the cores that it could ask for

    def to_text(self) -> str:
        return f"{to_list(self.trains_on)} {to_list(self.may_have)}"

    @classmethod
    def from_text(cls, text: str) -> RankCores:
        """Read the text. Raises ValueError if it has another form."""
        trains_on, may_have = text.split(" ")
        return cls(from_list(trains_on), from_list(may_have))


@dataclasses.dataclass(frozen=True)
class Domains:
    """How the cores of this host are grouped."""

    numa: Callable[[int], Cores]  # core → the cores that share a NUMA node with it
    siblings: Callable[[int], Cores]  # core → all numbers of the same core, including the given one


def from_list(text: str) -> Cores:
    """Read a list of cores as the kernel writes it: "0-3,8". Raises ValueError if it has another form."""
    if not _LIST.fullmatch(text.strip()):
        raise ValueError(f"{text[:80]!r} is not a list of cores, such as 0-3,8")
    cores: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cores |= set(range(int(first), int(last or first) + 1))
    if not cores or max(cores) >= _MOST:
        raise ValueError(f"{text[:80]!r} is not a list of cores, such as 0-3,8")
    return frozenset(cores)


def to_list(cores: Iterable[int]) -> str:
    """Write a list of cores: {0, 1, 2, 8} → "0-2,8"."""
    return ",".join(runs(cores))


def own_rank_cores(environment: Mapping[str, str]) -> RankCores:
    """Find the cores of this process."""
    trains_on = frozenset(os.sched_getaffinity(os.getpid()))  # of its main thread; other threads may be bound elsewhere
    may_have = _could_have()
    on_node = environment.get("SLURM_CPUS_ON_NODE", "")
    if on_node.isdigit() and int(on_node) < len(may_have):
        may_have = trains_on  # Slurm does not confine jobs: other cores may be other jobs'
    return RankCores(trains_on, may_have | trains_on)


def _could_have() -> Cores:
    """The cores that the cgroup of this process allows, whatever its mask is."""
    allowed: list[Cores] = []

    def ask() -> None:  # on a thread of its own, because the only way to find out is to take them
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, range(_MOST))
        allowed.append(frozenset(os.sched_getaffinity(0)))

    thread = threading.Thread(target=ask, name="mlflash-cores")
    thread.start()
    thread.join()
    return allowed[0]


def choose(ranks: Sequence[RankCores], own: int, domains: Domains | None = None) -> Cores | None:
    """Choose the cores of the courier of rank ``own`` of a host; None: those of its trainer, unchanged.

    All ranks of the host, whose cores are given in order, get different ones, or share.
    """
    domains = domains or here()
    free = [_free(rank, ranks, domains) for rank in ranks]
    near = [_near(cores, rank, domains) for cores, rank in zip(free, ranks, strict=True)]
    if not near[own]:
        return None
    sharing = [number for number, cores in enumerate(near) if cores == near[own]]
    return _part(near[own], sharing.index(own), len(sharing), domains)


def choose_among(texts: Mapping[int, str], rank: int) -> Cores | None:
    """Choose like `choose`, among the ranks of a host that have published theirs as text.

    Raises:
        ValueError: a text has another form, or this rank has published none.
    """
    numbers = sorted(texts)
    return choose([RankCores.from_text(texts[number]) for number in numbers], numbers.index(rank))


def _free(rank: RankCores, ranks: Sequence[RankCores], domains: Domains) -> Cores:
    taken: Cores = frozenset().union(*(other.trains_on for other in ranks))
    free = rank.may_have - taken
    whole = frozenset(core for core in free if not domains.siblings(core) & taken)
    return whole or free  # half of a core whose other half trains is better than a core that trains itself


def _near(cores: Cores, rank: RankCores, domains: Domains) -> Cores:
    """Those of some cores that are as near to the trainer's memory as the trainer; all of them if none are."""
    own: Cores = frozenset().union(*(domains.numa(core) for core in rank.trains_on))
    return cores & own or cores


def _part(cores: Cores, number: int, parts: int, domains: Domains) -> Cores:
    """One of ``parts`` equal parts, siblings together. All cores if there are too few for one core per part."""
    whole = sorted({tuple(sorted(domains.siblings(core) & cores)) or (core,) for core in cores})
    if len(whole) < parts:
        return cores
    return frozenset(
        core for both in whole[number * len(whole) // parts : (number + 1) * len(whole) // parts] for core in both
    )


def here() -> Domains:
    """How the cores of this host are grouped, according to the kernel."""
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
    except (OSError, ValueError):  # a node that has only memory, or a kernel that does not tell
        return frozenset()
