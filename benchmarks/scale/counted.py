"""Counts the objects that a Checkpointer and its courier create on a rank. Most ranks of the job are simulated.

Communicators and windows are those that exist after a save. Tables are the Python objects that a Checkpointer
references.
"""

from __future__ import annotations

import collections
import dataclasses
import gc
import sys
import threading
import types
from collections.abc import Mapping

from scale.jobs import COMMITS, simulated

_NOT_ITS_OWN = (types.ModuleType, type, types.FunctionType, types.BuiltinFunctionType, types.CodeType, types.FrameType)


@dataclasses.dataclass(frozen=True)
class Made:
    """Objects of the lowest live rank.

    Attributes:
        communicators: number of communicators by their size in ranks.
        windows: number of windows by the size of their communicator.
        threads: names of mlflash's threads on one rank.
        tables_nbytes: bytes of the Python objects that its Checkpointer references.
    """

    communicators: Mapping[int, int]
    windows: Mapping[int, int]
    threads: tuple[str, ...]
    tables_nbytes: int

    def of_communicators(self) -> str:
        """Give the communicators as text, such as "1 of 8"."""
        return _said(self.communicators)

    def of_windows(self) -> str:
        """Give the windows as text, empty if the rank has no window."""
        return _said(self.windows)


def count(ranks: int, scheme: str, transport: str = "p2p") -> Made:
    """Start a job of this size, save, and count."""
    with simulated(ranks, scheme, transport, alike=False) as job:
        job.start()
        for step in range(1, COMMITS + 1):
            job.commit(step)
        fabric = job._fabric
        assert fabric is not None
        there = [one for one in fabric.made if one.rank == job.live[0]]
        names = collections.Counter(
            thread.name for thread in threading.enumerate() if thread.name.startswith("mlflash-")
        )
        made = Made(
            collections.Counter(one.size for one in there if one.what == "communicator"),
            collections.Counter(one.size for one in there if one.what == "window"),
            tuple(sorted(name for name, number in names.items() for _ in range(number // len(job.live)))),
            reached_nbytes(job._checkpointers[0]),
        )
        job.stop()
        return made


def reached_nbytes(first: object) -> int:
    """Sum up the bytes of all Python objects reachable from one, without code and the simulation of MPI."""
    found, seen, nbytes = [first], {id(first)}, 0
    while found:
        one = found.pop()
        nbytes += sys.getsizeof(one)
        for other in gc.get_referents(one):
            if id(other) not in seen and not isinstance(other, _NOT_ITS_OWN) and not _simulates(other):
                seen.add(id(other))
                found.append(other)
    return nbytes


def _simulates(one: object) -> bool:
    return type(one).__module__.startswith(("scale.", "concurrent.", "logging"))


def _said(numbers: Mapping[int, int]) -> str:
    return ", ".join(f"{number} of {size:,}" for size, number in sorted(numbers.items(), reverse=True))
