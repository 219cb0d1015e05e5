"""Receives parts from other ranks in rounds of limited size, through a file that trainer and courier both map."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..memory.slot import Attempt
from ..protect.rank_checkpoint import ShareFiles
from ..state.shards import box, cut
from .ranks import Ranks
from .wanted_parts import WantedPart

if TYPE_CHECKING:
    from .client import Client

_LANDING_NBYTES = 64 << 20  # the largest size of a round


class Part(NamedTuple):
    """A `WantedPart`, and where its bytes go in the file that comes with the call."""

    rank: int
    number: int
    source: tuple[int, ...]
    shape: tuple[int, ...]
    at: int
    nbytes: int


def exchange(courier: Client, ranks: Ranks, attempt: Attempt, homes: Mapping[int, int], files: ShareFiles,
             asked: Mapping[int, Sequence[WantedPart]]) -> bool:  # fmt: skip
    """Get parts from other ranks, as much per round as the file can hold. Return whether all arrived intact.

    Collective over the world. The courier does each round; see `Session.exchange`.
    """
    with courier.restart_scope(joins=True):
        mine = [*rounds(asked)]
        most = ranks.largest(len(mine))
        if not most:
            return True
        good = True
        landing = Landing(max((sum(part.target.nbytes for _, part in those) for those in mine), default=0))
        try:
            for those in [*mine, *([] for _ in range(most - len(mine)))]:
                parts = landing.places(those)
                good &= courier.call("exchange", attempt, homes, files, parts, fds=(landing.fd,))
                landing.take(those)
        finally:
            landing.close()
        return good


def rounds(asked_for: Mapping[int, Sequence[WantedPart]]) -> Iterator[list[tuple[int, WantedPart]]]:
    """Split what is asked of ranks into rounds of at most 64 MiB."""
    some: list[tuple[int, WantedPart]] = []
    left = _LANDING_NBYTES
    for server, parts in asked_for.items():
        for part in parts:
            for offset, shape in cut(part.shape, part.target.shape[-1], _LANDING_NBYTES):
                source = tuple(a + b for a, b in zip(part.source, offset, strict=True))
                target = part.target[box(offset, shape)]
                if some and target.nbytes > left:
                    yield some
                    some, left = [], _LANDING_NBYTES
                some.append((server, WantedPart(part.rank, part.number, source, shape, target)))
                left -= target.nbytes
    if some:
        yield some


class Landing:
    """The file, on the trainer's side. Close it."""

    def __init__(self, nbytes: int):
        self.fd = os.memfd_create("mlflash-parts", os.MFD_CLOEXEC)
        os.truncate(self.fd, nbytes)
        self._view = np.frombuffer(mmap.mmap(self.fd, nbytes) if nbytes else b"", np.uint8)

    def close(self) -> None:
        self._view = np.empty(0, np.uint8)
        os.close(self.fd)

    def places(self, those: Sequence[tuple[int, WantedPart]]) -> dict[int, list[Part]]:
        """Where the parts of a round go, by the rank that has them."""
        parts: dict[int, list[Part]] = {}
        at = 0
        for server, part in those:
            told = Part(part.rank, part.number, part.source, part.shape, at, part.target.nbytes)
            parts.setdefault(server, []).append(told)
            at += part.target.nbytes
        return parts

    def take(self, those: Sequence[tuple[int, WantedPart]]) -> None:
        """Copy the parts of a round to their targets."""
        at = 0
        for _, part in those:
            part.target[...] = self._view[at : at + part.target.nbytes].reshape(part.target.shape)
            at += part.target.nbytes
