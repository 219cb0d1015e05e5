"""Checkpoints that were drained before format version 2: only the files of all ranks together say what they contain.

So the ranks share the reading of the indexes, and tell each other what these contain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import xxhash

from ..draining.file_index import Index
from ..draining.index_version_1 import IndexVersion1
from ..errors import CorruptSlot
from ..protocol.describe_ranks import Described, gather_ranks
from ..protocol.ranks import Collectives
from ..state.leaves import ties_of
from ..state.old_ranks import OldRanks

_Piece = tuple[int, str, int, int, int]  # `Piece.common`, name, first row, row after the last, checksum


class ToldPieces:
    """Says which rank has which part of what several ranks hold alike.

    Args:
        commons: for each rank and leaf, the `Piece.common` by which its pieces are found.
        pieces: the pieces of each rank.
    """

    def __init__(self, commons: dict[int, tuple[int, ...]], pieces: dict[int, list[_Piece]]):
        same: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._commons = {rank: same.setdefault(its, its) for rank, its in commons.items()}
        self._pieces: dict[tuple[int, str], list[tuple[int, int, int, int]]] = {}
        for rank in sorted(pieces):
            for common, name, begin, end, check in pieces[rank]:
                self._pieces.setdefault((common, name), []).append((rank, begin, end, check))

    def ranks(self, rank: int, number: int, name: str, begin: int, end: int) -> Iterable[int] | None:
        """The ranks whose files may have rows of a leaf; None if these are in the rank's own file."""
        common = self._commons[rank][number]
        if common < 0:
            return None
        return [of for of, first, last, _ in self._pieces.get((common, name), ()) if first < end and begin < last]

    def checks(self) -> dict[str, set[int]]:
        """The distinct checksums of what sets of ranks hold alike, by name."""
        found: dict[str, set[int]] = {}
        for (_, name), pieces in self._pieces.items():
            found.setdefault(name, set()).add(_check([check for *_, check in pieces]))
        return found


def read_version_1(world: Collectives, mine: Iterable[int], index: Callable[[int], Index],
                   together: Callable[[Callable[[], Any]], Any]) -> tuple[OldRanks, ToldPieces]:  # fmt: skip
    """Find out what the old ranks hold. Collective over the world.

    Args:
        world: the ranks that read.
        mine: the old ranks whose indexes this one reads.
        index: reads one index.
        together: raises on all ranks what goes wrong on any.

    Raises:
        CorruptSlot: on all ranks, if a file is missing, damaged, or was changed since.
    """

    def describe(rank: int) -> Described:
        its = index(rank)
        if not isinstance(its, IndexVersion1):
            raise CorruptSlot(
                "this file has another format version than the file that commits the checkpoint", rank=rank
            )
        return _describe(its)

    described = together(lambda: {rank: describe(rank) for rank in mine})
    gathered = gather_ranks(world, described)
    dealt = ToldPieces({rank: more[0] for rank, more in gathered.more.items()},
                       {rank: more[1] for rank, more in gathered.more.items()})  # fmt: skip
    gathered.more.clear()
    differ = set(gathered.differ)
    for name, checks in dealt.checks().items():
        alone = {n % (1 << 64) for n in gathered.checks.get(name, ())}
        differ |= {name} if len(checks | alone) > 1 else set()
    return OldRanks(gathered.groups, frozenset(differ), gathered.plain_differ, gathered.plain_of, {}), dealt


def _describe(its: IndexVersion1) -> Described:
    entries, places = its.manifest.entries, its.places
    checks = {number: _check([places.check(places.of[first])])
              for number, (entry, first) in enumerate(zip(entries, ties_of(entries), strict=True))
              if its.commons[number] < 0 and entry.shape == entry.global_shape}  # fmt: skip
    pieces = [(common, entries[number].name, place.begin, place.begin + place.rows, places.check(place))
              for number, place in places.of.items() if (common := its.common_of[number]) >= 0]  # fmt: skip
    return Described.of(entries, its.manifest.tree, its.manifest.plain, checks, (its.commons, pieces))


def _check(checks: list[int]) -> int:
    return xxhash.xxh3_64_intdigest(np.array(checks, dtype="<u8").tobytes())
