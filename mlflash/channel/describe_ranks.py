"""Combines what each rank of a checkpoint holds into a description of all of them, the same on all ranks.

    keys         each rank tells which structure each rank that it describes has                      1 gather
    structures   for each structure, the rank that describes its lowest rank tells what it is         1 gather
    alike        tensors that ranks hold whole, and plain leaves, are compared by checksums           1 allreduce
    rows         for each rank its numbers, and the plain leaves that differ from the lowest rank's   1 gather

So each structure travels once, and no rank sends or keeps a checksum for each tensor of each rank.
"""

from __future__ import annotations

import dataclasses
import pickle
import zlib
from collections.abc import Collection, Generator, Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from ..state.leaves import Entry, Tree
from ..state.old_ranks import Group, OldRanks, RankStructure
from .ranks import Collectives

_MOST = int(np.iinfo(np.int64).max)

Steps = Generator[tuple[str, Any], Any, "Gathered"]
"""The agreements needed, each ``("gather", value)`` or ``("least_of", numbers)``; the generator is sent the answers."""


@dataclasses.dataclass(frozen=True)
class Described:
    """A rank of a checkpoint, described by a rank that has its slot or file."""

    structure: RankStructure
    row: np.ndarray
    plain: list[Any]
    checks: Mapping[int, int]  # 64-bit checksums of the tensors that it holds whole, by number
    more: Any = None  # other data for all ranks

    @classmethod
    def of(cls, entries: Sequence[Entry], tree: Tree, plain: list[Any], checks: Mapping[int, int], more: Any = None
           ) -> Described:  # fmt: skip
        return cls(*RankStructure.of(entries, tree), plain, checks, more)


@dataclasses.dataclass(frozen=True)
class Gathered:
    """What all ranks hold."""

    groups: list[Group]  # the ranks of each structure
    checks: dict[str, tuple[int, int]]  # the smallest and the largest of each tensor that ranks hold whole, by name
    plain_differ: frozenset[str]  # paths of plain leaves that are not the same on all ranks
    more: dict[int, Any]
    plain: dict[int, bytes]  # for each rank the leaves that differ from the first rank of its group, packed

    def plain_of(self, rank: int) -> list[Any]:
        group = next(group for group in self.groups if rank in group.ranks)
        values = list(group.plain)
        if self.plain[rank]:
            for number, value in pickle.loads(zlib.decompress(self.plain[rank])).items():
                values[number] = value
        return values

    @property
    def differ(self) -> frozenset[str]:
        """The names of tensors that ranks hold whole, but with different values."""
        return frozenset(name for name, (low, high) in self.checks.items() if low != high)

    def old_ranks(self, compared: bool, contents: Mapping[int, Mapping[str, bytes]], near: Collection[int] | None = None
                  ) -> OldRanks:  # fmt: skip
        differ = self.differ if compared else None
        return OldRanks(self.groups, differ, self.plain_differ, self.plain_of, contents, near)


def gather_ranks(world: Collectives, own: Mapping[int, Described]) -> Gathered:
    """Tell all ranks what each of them can describe: each rank of the checkpoint is described by one. Collective."""
    steps, answer = gathering(own), None
    while True:
        try:
            verb, value = steps.send(answer)
        except StopIteration as end:
            gathered: Gathered = end.value
            return gathered
        answer = world.gather(value) if verb == "gather" else world.least_of(value)


def gathering(own: Mapping[int, Described]) -> Steps:
    """Do what `gather_ranks` does, step by step."""
    keys = yield "gather", {rank: described.structure.key for rank, described in own.items()}
    key_of = {rank: key for keys_of_rank in keys for rank, key in keys_of_rank.items()}
    ranks_of: dict[bytes, list[int]] = {}
    for rank in sorted(key_of):
        ranks_of.setdefault(key_of[rank], []).append(rank)
    first = {ranks[0] for ranks in ranks_of.values()}
    gathered = yield "gather", {
        described.structure.key: (described.structure, described.plain)
        for rank, described in own.items() if rank in first
    }  # fmt: skip
    known: dict[bytes, tuple[RankStructure, list[Any]]] = {}
    for structures in gathered:
        known |= structures
    checks, of_plain = yield from _compared([known[key][0] for key in ranks_of], own)
    plain_differ = frozenset(path for path, (low, high) in of_plain.items() if low != high)
    packed = yield "gather", zlib.compress(pickle.dumps({
        rank: (described.row.tobytes(), _otherwise(described.plain, known[described.structure.key][1]), described.more)
        for rank, described in own.items()
    }), 1)  # fmt: skip
    row_of = {rank: row for content in packed for rank, row in pickle.loads(zlib.decompress(content)).items()}
    groups = []
    for key, ranks in ranks_of.items():
        structure, plain = known[key]
        rows = np.frombuffer(b"".join(row_of[rank][0] for rank in ranks), dtype="<i8")
        rows = rows.reshape(len(ranks), structure.starts[-1])
        groups.append(Group(structure, np.array(ranks, dtype=np.int64), rows, plain))
    more = {rank: row[2] for rank, row in row_of.items()}
    return Gathered(groups, checks, plain_differ, more, {rank: row[1] for rank, row in row_of.items()})


def _otherwise(plain: Sequence[Any], base: Sequence[Any]) -> bytes:
    """The values of one rank that differ from those of another, packed."""
    pairs = enumerate(zip(plain, base, strict=True))
    other = {number: value for number, (value, usual) in pairs if repr(value) != repr(usual)}
    return zlib.compress(pickle.dumps(other), 1) if other else b""


_Extremes = dict[str, tuple[int, int]]


def _compared(structures: Sequence[RankStructure], own: Mapping[int, Described]
              ) -> Generator[tuple[str, Any], Any, tuple[_Extremes, _Extremes]]:  # fmt: skip
    """The smallest and the largest checksum of each name and of each path. They differ if the ranks do."""
    names = list(dict.fromkeys(name for structure in structures for name in structure.names))
    paths = list(dict.fromkeys(path for structure in structures for path in structure.paths))
    of_name, of_path = (
        {key: at for at, key in enumerate(keys, first)} for keys, first in ((names, 0), (paths, len(names)))
    )
    low, high = (np.full(len(names) + len(paths), _MOST, dtype=np.int64) for _ in range(2))  # high: of complements
    for described in own.values():
        structure, plain = described.structure, described.plain
        at = [of_name[structure.names[number]] for number in described.checks]
        at += [of_path[path] for path in structure.paths]
        checks = [*described.checks.values(), *(_check(plain[number]) for number in structure.paths.values())]
        values = np.array(checks, dtype=np.uint64).view(np.int64)
        np.minimum.at(low, at, values)
        np.minimum.at(high, at, ~values)
    agreed = np.array((yield "least_of", [*low.tolist(), *high.tolist()]), dtype=np.int64).reshape(2, -1)
    pairs = list(zip(agreed[0].tolist(), (~agreed[1]).tolist(), strict=True))
    return tuple({key: pairs[at] for key, at in of.items() if pairs[at][0] <= pairs[at][1]}
                 for of in (of_name, of_path))  # type: ignore[return-value]  # fmt: skip


def _check(value: Any) -> int:
    return xxhash.xxh3_64_intdigest(repr(value).encode(errors="surrogatepass"))
