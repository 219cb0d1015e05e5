"""Step-by-step operations, MPI collectives in this form, and what ranks agree on by them.

A job of the courier runs them to their end (`World.drive`). Work outside of jobs is advanced a little whenever the
courier has nothing else to do (see `background_collectives`). Every collective takes ``mpi``, the module mpi4py.MPI,
and ``comm``, over which it is collective; comm is None without MPI.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..errors import MlflashError
from ..placement.topology import Topology

Operation = Generator[bool, None, Any]
"""A step-by-step operation. It yields True if it has progressed and False if it waits, and returns its result."""


def done(request: Any) -> Operation:
    """Wait for an MPI request."""
    while not request.Test():
        yield False


def side_by_side(operations: Iterable[Operation]) -> Operation:
    """Run operations together as one operation. Its result is the list of their results."""
    running = dict(enumerate(operations))
    results: list[Any] = [None] * len(running)
    while running:
        moved = False
        for i, operation in list(running.items()):
            try:
                moved |= next(operation)
            except StopIteration as end:
                results[i] = end.value
                del running[i]
                moved = True
        if running:
            yield moved
    return results


def least_of(mpi: Any, comm: Any, values: np.ndarray) -> Operation:
    """Take the minimum of each number over all ranks: one allreduce."""
    if comm is None:
        return values
    out = np.empty_like(values)
    yield from done(comm.Iallreduce(values, out, mpi.MIN))
    return out


def gather(mpi: Any, comm: Any, value: Any) -> Operation:
    """Give every rank the (pickled) value of every rank."""
    if comm is None:
        return [value]
    packed = np.frombuffer(pickle.dumps(value), dtype=np.uint8)
    sizes = np.empty(comm.size, dtype=np.int64)
    yield from done(comm.Iallgather(np.array([packed.nbytes], dtype=np.int64), sizes))
    out = np.empty(int(sizes.sum()), dtype=np.uint8)
    starts = np.concatenate(([0], np.cumsum(sizes)[:-1]))
    yield from done(comm.Iallgatherv(packed, [out, (sizes, starts), mpi.BYTE]))
    return [pickle.loads(out[a : a + n].tobytes()) for a, n in zip(starts, sizes, strict=True)]


def broadcast(comm: Any, value: Any, root: int) -> Operation:
    """Give every rank the (pickled) value of one rank."""
    if comm is None:
        return value
    packed = np.frombuffer(pickle.dumps(value) if comm.rank == root else b"", dtype=np.uint8)
    size = np.array([packed.nbytes], dtype=np.int64)
    yield from done(comm.Ibcast(size, root))
    out = packed.copy() if comm.rank == root else np.empty(int(size[0]), dtype=np.uint8)
    yield from done(comm.Ibcast(out, root))
    return pickle.loads(out.tobytes())


def raise_together(mpi: Any, comm: Any, error: MlflashError | None, values: Sequence[int] = ()) -> Operation:
    """If any rank has an error, raise that of the lowest on all, causes first; otherwise return the minima."""
    rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
    own = [rank if error is not None and not error.follows else size, rank if error is not None else size]
    cause, first, *least = yield from least_of(mpi, comm, np.array([*own, *values], dtype=np.int64))
    if first < size:
        agreed: MlflashError = yield from broadcast(comm, error, int(cause if cause < size else first))
        agreed.agreed = True
        raise agreed
    return [int(number) for number in least]


class SendRate:
    """Limits how many bytes per second the courier sends.

    Args:
        rate: bytes per second of this rank; 0: no limit.
    """

    def __init__(self, rate: float):
        self.rate = rate
        self._free_at = 0.0

    def send(self, nbytes: int) -> Operation:
        """Wait until bytes may be sent. For the courier."""
        if self.rate:
            while time.monotonic() < self._free_at:
                yield False
            self._free_at = max(self._free_at, time.monotonic() - 1e-3) + nbytes / self.rate


AT_ONCE = SendRate(0)
"""For transfers that training waits for."""


_NOTHING: Mapping[str, int] = {}


class Agreement:
    """How ranks agree; ``least_of`` is what a class of ranks defines.

    Attributes:
        rank, size: of this process, and how many there are.
        topology: where they are.
    """

    rank: int
    size: int
    topology: Topology

    @property
    def node_index(self) -> int:
        return self.topology.node_of[self.rank]

    @property
    def node_name(self) -> str:
        return self.topology.name_of(self.rank)

    def least_of(self, values: Sequence[int], comm: Any = None) -> list[int]:
        """Take the minimum of each number over all ranks of ``comm``; None: all ranks."""
        raise NotImplementedError

    def agree(self, *, all_of: Mapping[str, object] = _NOTHING, any_of: Mapping[str, object] = _NOTHING,
              min_of: Mapping[str, int] = _NOTHING, max_of: Mapping[str, int] = _NOTHING,
              comm: Any = None) -> SimpleNamespace:  # fmt: skip
        """Find out what is true on all ranks, or on any, and the smallest and largest of some numbers.

        Example:
            ``agree(all_of={"settled": is_settled}, max_of={"newest": generation})`` returns an object with the
            attributes ``settled`` (bool) and ``newest`` (int), the same on all ranks.
        """
        names = [*all_of, *any_of, *min_of, *max_of]
        own = [*map(bool, all_of.values()), *(not value for value in any_of.values()), *min_of.values(),
               *(-number for number in max_of.values())]  # fmt: skip
        agreed: dict[str, Any] = dict(zip(names, self.least_of(list(map(int, own)), comm), strict=True))
        agreed |= {name: bool(agreed[name]) for name in all_of} | {name: not agreed[name] for name in any_of}
        return SimpleNamespace(**agreed | {name: -agreed[name] for name in max_of})

    def all_of(self, value: object, comm: Any = None) -> bool:
        """Whether something is true on all ranks."""
        return bool(self.least_of([int(bool(value))], comm)[0])

    def any_of(self, value: object, comm: Any = None) -> bool:
        """Whether something is true on any rank."""
        return not self.all_of(not value, comm)

    def largest(self, number: int) -> int:
        """The largest of the ranks' numbers."""
        return -self.least_of([-number])[0]

    def is_same(self, number: int, comm: Any = None) -> bool:
        """Whether all ranks have the same number."""
        low, high = self.least_of([number, -number], comm)
        return low == -high

    def barrier(self) -> None:
        """Return when all ranks have come here."""
        self.least_of([0])
