"""What all ranks of a drained checkpoint hold, and in which files: the index of the file that commits it.

    8 bytes      size of the JSON document that follows
    document     {"format", "job", "groups": [[structure, plain leaves, ranks], ...], "differ", "plain_differ"}
    files        for each rank 6 numbers of 64 bits, see `_FILE`
    dealt        for each rank 3 signed numbers, see `RankTable.dealt`
    groups       for each group its ranks, and a row of numbers for each of them, see `state.old_ranks`

What several ranks hold alike lies in their files one after the other, in runs of rows. Where each of them begins says
which run is whose. So the table takes a few hundred bytes for a rank, and nobody needs another rank's index to find
these rows.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..courier.describe_ranks import Gathered
from ..errors import CorruptSlot
from ..state import manifest
from ..state.old_ranks import MOST, Group, RankStructure, structure_from_document
from ..state.plain_values import check_plain
from .file_index import Stored

_COUNT = struct.Struct("<Q")
_FILE = ("nbytes", "index_check", "data_nbytes", "places_start", "places_nbytes", "places_check")
_SIZES = (0, 2, 3, 4)  # positions of those fields that are not checksums


@dataclasses.dataclass(frozen=True)
class RankTable:
    """What all ranks of a checkpoint hold.

    Attributes:
        groups, differ, plain_differ: see `old_ranks.OldRanks`.
        dealt: for each rank the lowest rank of its set, or -1; and where it begins, in bytes, in what all ranks hold
            alike and in what the set shares, ``(ranks, 3)`` int64.
    """

    groups: list[Group]
    differ: frozenset[str]
    plain_differ: frozenset[str]
    files: list[Stored]
    dealt: np.ndarray


def encode(form: str, job: str, files: Sequence[Stored], gathered: Gathered) -> bytes:
    """Encode the index. ``more`` has each rank's row of `RankTable.dealt`, with -1 where nothing was dealt to it."""
    groups = [[its.structure.document, its.plain, len(its.ranks)] for its in gathered.groups]
    document = {"format": form, "job": job, "groups": groups, "differ": sorted(gathered.differ),
                "plain_differ": sorted(gathered.plain_differ)}  # fmt: skip
    text = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
    listed = np.array([[getattr(stored, name) for name in _FILE] for stored in files], dtype="<u8")
    dealt = _filled(np.array([gathered.more[rank] for rank in range(len(files))], dtype="<i8"))
    rows = [part for its in gathered.groups for part in (its.ranks, its.rows)]
    return b"".join([_COUNT.pack(len(text)), text, *(part.astype(part.dtype.newbyteorder("<")).tobytes()
                                                     for part in (listed, dealt, *rows))])  # fmt: skip


def _filled(dealt: np.ndarray) -> np.ndarray:
    """Let a rank to which nothing was dealt begin where the next one of its set does, or at the end."""
    found: np.ndarray = dealt.copy()
    for column, sets in ((1, np.zeros(len(dealt), dtype=np.int64)), (2, dealt[:, 0])):
        for one in np.unique(sets):
            members, end = np.flatnonzero(sets == one), MOST
            for rank in members[::-1]:
                end = found[rank, column] = end if found[rank, column] < 0 else found[rank, column]
    return found


def decode(raw: bytes, world_size: int) -> RankTable:
    """Read the index and check every number in it. Raises CorruptSlot."""
    try:
        (length,) = _COUNT.unpack_from(raw)
        document = json.loads(raw[_COUNT.size : _COUNT.size + length])
        numbers = _Numbers(raw, _COUNT.size + length)
        files = numbers.take(world_size, len(_FILE), "<u8")
        if (files[:, _SIZES] > MOST).any():
            raise ValueError("a file without a size")
        dealt = numbers.take(world_size, 3, "<i8")
        if (dealt < -1).any() or (dealt[:, 0] >= world_size).any() or (dealt[:, 1:] > MOST).any():
            raise ValueError("a rank begins nowhere")
        groups = [_group(fields, numbers, world_size) for fields in document["groups"]]
        ranks = np.sort(np.concatenate([its.ranks for its in groups]))
        if numbers.at != len(raw) or not np.array_equal(ranks, np.arange(world_size)):
            raise ValueError(f"not each of {world_size} ranks is there once")
        _check_order(groups, dealt)
        differ, plain_differ = (frozenset(_texts(document[name])) for name in ("differ", "plain_differ"))
        names = _names(document["format"])
        stored = [
            Stored(names[0] % rank, nbytes, check, names[1] % rank, *more)
            for rank, (nbytes, check, *more) in enumerate(files.tolist())
        ]
    except (*manifest.BAD_DOCUMENT, struct.error) as error:
        raise CorruptSlot(f"the index of the file that commits a checkpoint is damaged: {error!r}") from None
    return RankTable(groups, differ, plain_differ, stored, dealt)


def _names(form: Any) -> tuple[str, str]:
    return {"hdf5": ("rank-%05d.h5", "rank-%05d.h5"), "dcp": ("rank-%05d.mlflash", "__%d_0.distcp")}[form]


class _Numbers:
    def __init__(self, raw: bytes, at: int):
        self._raw, self.at = raw, at

    def take(self, rows: int, width: int, dtype: str) -> np.ndarray:
        nbytes = rows * width * 8
        if self.at + nbytes > len(self._raw):
            raise ValueError(f"{rows} x {width} numbers are not there")
        found = np.frombuffer(self._raw, dtype=dtype, count=rows * width, offset=self.at).reshape(rows, width)
        self.at += nbytes
        return found


def _group(fields: Any, numbers: _Numbers, world_size: int) -> Group:
    structure, plain, count = fields
    if type(count) is not int or not 0 < count <= world_size or not isinstance(plain, list):
        raise ValueError(f"a group of {count!r} ranks")
    for value in plain:
        check_plain(value)
    made = structure_from_document(structure, len(plain))
    ranks = numbers.take(count, 1, "<i8").reshape(-1)
    if (np.diff(ranks) <= 0).any():
        raise ValueError("ranks that do not ascend")
    rows = numbers.take(count, made.starts[-1], "<i8")
    made.check_rows(rows)
    return Group(made, ranks, rows, plain)


def _check_order(groups: Sequence[Group], dealt: np.ndarray) -> None:
    """Check that ranks have what they hold alike, or share in a set, in one order, and that parts are contiguous."""
    seen: dict[int, list[str]] = {}
    for its in groups:
        structure = its.structure
        alike, shared = ([structure.names[n] for n in leaves] for leaves in (structure.alike, structure.shared))
        sets = [(int(by), shared) for by in np.unique(dealt[its.ranks, 0]) if by >= 0]
        if any(seen.setdefault(by, names) != names for by, names in [(-1, alike), *sets]):
            raise ValueError("ranks that hold other tensors alike")
    order = np.lexsort((np.arange(len(dealt)), dealt[:, 0]))
    same = np.diff(dealt[order, 0]) == 0
    if (np.diff(dealt[:, 1]) < 0).any() or (same & (np.diff(dealt[order, 2]) < 0)).any():
        raise ValueError("a rank begins before the one before it")


def _texts(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ValueError("a name that is no text")
    return value


class Dealt:
    """Finds the files that contain what several ranks hold alike."""

    def __init__(self, table: RankTable):
        self._dealt = table.dealt
        self._group_of = {rank: its for its in table.groups for rank in its.ranks.tolist()}
        self._begins: dict[int, tuple[np.ndarray, np.ndarray, list[int]]] = {}

    def ranks(self, rank: int, number: int, name: str, begin: int, end: int) -> list[int] | None:
        """The ranks whose files may have rows of a leaf; None if these are in the rank's own file."""
        its = self._group_of[rank]
        alike, shared = its.structure.places
        if number not in alike and number not in shared:
            return None
        row, by = its.rows[np.searchsorted(its.ranks, rank)], int(self._dealt[rank, 0])
        if number in alike:
            members, begins, firsts = self._runs(-1, its.structure, row, its.structure.alike)
            nth = alike[number]
        else:
            members, begins, firsts = self._runs(by, its.structure, row, its.structure.shared)
            nth = shared[number]
        one = (firsts[nth + 1] - firsts[nth]) // max(1, next(iter(its.structure.shape(row, number)), 1))
        first, last = firsts[nth] + begin * one, firsts[nth] + end * one
        low, high = int(np.searchsorted(begins, first, "right")) - 1, int(np.searchsorted(begins, last, "left"))
        return [int(member) for member in members[max(0, low) : high]]

    def _runs(self, by: int, structure: RankStructure, row: np.ndarray, leaves: Sequence[int]
              ) -> tuple[np.ndarray, np.ndarray, list[int]]:  # fmt: skip
        """The ranks of a set (-1: all), where each begins, and where each of the leaves does."""
        if by not in self._begins:
            members = np.arange(len(self._dealt)) if by < 0 else np.flatnonzero(self._dealt[:, 0] == by)
            firsts = list(itertools.accumulate((structure.nbytes(row, number) for number in leaves), initial=0))
            self._begins[by] = members, self._dealt[members, 1 if by < 0 else 2], firsts
        return self._begins[by]
