"""Parts of tensors of old ranks that a rank wants, and how it gets them from the ranks that have them.

They come in rounds of limited size, through a file that trainer and courier both map.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..memory.slot import Attempt
from ..protect.rank_checkpoint import ShareFiles
from ..state.boxes import box, cut
from ..state.leaves import Entry
from .ranks import Ranks

if TYPE_CHECKING:
    from .client import Client

_ROUND_NBYTES = 64 << 20  # the largest size of a round


class WantedPart(NamedTuple):
    """A wanted part of an old shard."""

    rank: int
    number: int  # of the entry in the manifest of that rank
    source: tuple[int, ...]  # where the part begins in that shard
    shape: tuple[int, ...]
    target: np.ndarray  # where it goes, ``(*shape, item bytes)`` uint8


class Part(NamedTuple):
    """A `WantedPart`, and where its bytes go in the file that comes with the call."""

    rank: int
    number: int
    source: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    nbytes: int


def items(raw: np.ndarray, entry: Entry) -> np.ndarray:
    """View the bytes of an entry as ``(*shape, item bytes)``."""
    return raw.reshape(*entry.shape, entry.nbytes // max(1, math.prod(entry.shape)))


def exchange(courier: Client, ranks: Ranks, attempt: Attempt, homes: Mapping[int, int], files: ShareFiles,
             asked: Mapping[int, Sequence[WantedPart]]) -> bool:  # fmt: skip
    """Get parts from other ranks, as much per round as the file can hold. Return whether all arrived intact.

    Collective over the world. The courier does each round; see `Session.exchange`.
    """
    with courier.restart_scope(joins=True):
        rounds = [*_rounds(asked)]
        most = ranks.largest(len(rounds))
        if not most:
            return True
        good = True
        landing = Landing.make(max((sum(part.target.nbytes for _, part in parts) for parts in rounds), default=0))
        try:
            for parts in [*rounds, *([] for _ in range(most - len(rounds)))]:
                good &= courier.call("exchange", attempt, homes, files, _placed(parts), fds=(landing.fd,))
                landing.take(parts)
        finally:
            landing.close()
        return good


def _rounds(asked: Mapping[int, Sequence[WantedPart]]) -> Iterator[list[tuple[int, WantedPart]]]:
    """Split what is asked of ranks into rounds of at most 64 MiB."""
    parts: list[tuple[int, WantedPart]] = []
    room_nbytes = _ROUND_NBYTES
    for server, wanted in asked.items():
        for part in wanted:
            for offset, shape in cut(part.shape, part.target.shape[-1], _ROUND_NBYTES):
                source = tuple(a + b for a, b in zip(part.source, offset, strict=True))
                target = part.target[box(offset, shape)]
                if parts and target.nbytes > room_nbytes:
                    yield parts
                    parts, room_nbytes = [], _ROUND_NBYTES
                parts.append((server, WantedPart(part.rank, part.number, source, shape, target)))
                room_nbytes -= target.nbytes
    if parts:
        yield parts


def _placed(wanted: Sequence[tuple[int, WantedPart]]) -> dict[int, list[Part]]:
    """Where the parts of a round go in the file, one after the other, by the rank that has them."""
    parts: dict[int, list[Part]] = {}
    start = 0
    for server, part in wanted:
        nbytes = part.target.nbytes
        parts.setdefault(server, []).append(Part(part.rank, part.number, part.source, part.shape, start, nbytes))
        start += nbytes
    return parts


class Landing:
    """The file for the parts of a round, in the trainer or in its courier. Close it; that closes ``fd``."""

    def __init__(self, fd: int):
        self.fd = fd
        size = os.fstat(fd).st_size
        self._view = np.frombuffer(mmap.mmap(fd, size) if size else b"", np.uint8)

    @classmethod
    def make(cls, nbytes: int) -> Landing:
        """Make the file, in the trainer."""
        fd = os.memfd_create("mlflash-parts", os.MFD_CLOEXEC)
        os.truncate(fd, nbytes)
        return cls(fd)

    def close(self) -> None:
        self._view = np.empty(0, np.uint8)
        os.close(self.fd)

    def wanted(self, asked: Mapping[int, Sequence[Part]]) -> dict[int, list[WantedPart]]:
        """The parts of a round as the courier fetches them, with their places in the file as targets."""
        return {rank: [self._wanted(part) for part in parts] for rank, parts in asked.items()}

    def _wanted(self, part: Part) -> WantedPart:
        raw = self._view[part.start : part.start + part.nbytes]
        target = raw.reshape(*part.shape, part.nbytes // max(1, math.prod(part.shape)))
        return WantedPart(part.rank, part.number, part.source, part.shape, target)

    def take(self, wanted: Sequence[tuple[int, WantedPart]]) -> None:
        """Copy the parts of a round to the targets of the trainer."""
        start = 0
        for _, part in wanted:
            end = start + part.target.nbytes
            part.target[...] = self._view[start:end].reshape(part.target.shape)
            start = end
