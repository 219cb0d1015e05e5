"""What all ranks hold, in little memory: the same answers as with an object for each leaf of each rank."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.held_by_all import Held, fragments, is_private, merge_plain, private_plain

from mlflash.draining.file_index import first_names
from mlflash.errors import StructureMismatch
from mlflash.mpi.world import World
from mlflash.protocol.describe_ranks import Described, gather_ranks
from mlflash.state import manifest
from mlflash.state.leaves import Entry
from mlflash.state.old_ranks import RankStructure, structure_from_document

ALONE = World(None, 0, math.inf)
WHOLES: tuple[tuple[int, ...], ...] = ((), (1,), (4,), (6,), (4, 3), (0, 2))
TREE = ["d", [["plain", ["p", 0]], ["other", ["p", 1]]]]


@dataclasses.dataclass
class Rank:
    """A rank that was made up: its entries, a checksum of each that is whole, and its plain leaves."""

    entries: tuple[Entry, ...]
    checks: dict[int, int]
    plain: list[Any]

    def described(self) -> Described:
        return Described.of(self.entries, TREE, self.plain, self.checks)


@st.composite
def some_box(draw: st.DrawFn, whole: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A box of a tensor: all of it, half of it, or any."""
    offset = tuple(draw(st.integers(0, n)) for n in whole)
    shape = tuple(draw(st.integers(0, n - at)) for at, n in zip(offset, whole, strict=True))
    half = tuple((0, n // 2) if draw(st.booleans()) else (n // 2, n - n // 2) for n in whole[:1])
    cut = (*(at for at, _ in half), *(0 for _ in whole[1:])), (*(n for _, n in half), *whole[1:])
    return draw(st.sampled_from([((0,) * len(whole), whole), cut, (offset, shape)]))


@st.composite
def some_rank(draw: st.DrawFn) -> Rank:
    entries, checks, at = [], {}, 0
    for name in draw(st.lists(st.sampled_from("abcde"), unique=True, max_size=5)):
        kind, dtype = draw(st.sampled_from([("tensor", "float32"), ("tensor", "float32"), ("array", "<f4")]))
        whole = draw(st.sampled_from([WHOLES["abcde".index(name)], draw(st.sampled_from(WHOLES))]))
        offset, shape = draw(some_box(whole))
        nbytes = 4 * math.prod(shape)
        entries.append(Entry(name, kind, dtype, whole, offset, shape, at, nbytes))
        if shape == whole:
            checks[len(entries) - 1] = draw(st.sampled_from([7, 2**64 - 1]))
        at += nbytes if draw(st.booleans()) else 0  # else the next one is tied to it, where it is alike
    return Rank(tuple(entries), checks, draw(st.lists(st.sampled_from([1, True, "x", 0.5]), min_size=2, max_size=2)))


def held_by_name(ranks: Sequence[Rank]) -> dict[str, list[Held]]:
    found: dict[str, list[Held]] = {}
    for rank, its in enumerate(ranks):
        for number, entry in enumerate(its.entries):
            found.setdefault(entry.name, []).append(Held(rank, number, entry, its.checks.get(number)))
    return found


def answer(ask: Any) -> Any:
    try:
        found = ask()
    except StructureMismatch as error:
        # Which of several ranks that differ is named is no matter.
        return error.message, error.tensor
    return None if found is None else [*found]


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_ranks_give_the_same_answers_as_an_object_for_each_leaf(data: st.DataObject) -> None:
    ranks = data.draw(st.lists(some_rank(), min_size=1, max_size=6))
    ranks = [ranks[nth] for nth in data.draw(st.lists(st.integers(0, len(ranks) - 1), min_size=1, max_size=12))]
    near = data.draw(st.sets(st.integers(0, len(ranks) - 1)))
    olds = gather_ranks(ALONE, {rank: its.described() for rank, its in enumerate(ranks)}).old_ranks(True, {}, near)
    held = held_by_name(ranks)
    assert held.keys() == olds.spots.keys() and [*olds] == [*range(len(ranks))]
    for name, those in held.items():
        assert olds.is_private(olds.spots[name]) == is_private(those)
        assert olds.is_sharded(olds.spots[name]) == any(one.check is None for one in those)
        for rank in (0, len(ranks) - 1, len(ranks) + 1):
            like = data.draw(st.sampled_from(those)).entry
            offset, shape = data.draw(some_box(like.global_shape))
            want = dataclasses.replace(like, offset=offset, shape=shape, nbytes=4 * math.prod(shape))
            for _ in range(2):  # once more, from what was kept
                assert answer(lambda: olds.parts(want, rank)) == answer(lambda: fragments(want, those, rank, near))  # noqa: B023
    plain = {rank: dict(zip(("plain", "other"), its.plain, strict=True)) for rank, its in enumerate(ranks)}
    assert olds.plain_differ == private_plain(plain)
    for rank in (0, len(ranks)):
        values, paths = ["mine", "mine, too"], {"plain": 0, "other": 1}
        mine, theirs = olds.merge_plain(values, paths, rank), merge_plain(values, paths, plain, rank)[0]
        assert [*map(repr, mine)] == [*map(repr, theirs)]
    for rank, its in enumerate(ranks):
        assert [dataclasses.replace(entry, start=0) for entry in olds[rank].entries] == [
            dataclasses.replace(entry, start=0) for entry in its.entries
        ]
        assert {path: repr(value) for path, value in olds[rank].plain.items()} == {
            path: repr(value) for path, value in plain[rank].items()
        }
        assert first_names(olds[rank].entries) == first_names(its.entries)
        structure, row = RankStructure.of(its.entries, TREE)
        assert structure_from_document(json.loads(json.dumps(structure.document)), 2) == structure
        structure.check_rows(row[None])


def test_ranks_that_nobody_compared_are_not_called_private() -> None:
    one = Entry("w", "tensor", "float32", (4,), (0,), (4,), 0, 16)
    mine = {rank: Described.of([one], ["e", 0], [], {}) for rank in range(3)}
    olds = gather_ranks(ALONE, mine).old_ranks(False, {}, [])
    assert not olds.compared and not olds.is_private(olds.spots["w"])
    assert [part.rank for part in olds.parts(one, 7) or ()] == [1]
    assert [part.rank for part in olds.parts(one, 7, only=2) or ()] == [2]
    with pytest.raises(KeyError):
        olds[3]


def many(ranks: int, leaves: int) -> dict[int, Described]:
    """Ranks that have each tensor in shards, and a plain leaf of their own."""
    entries = [Entry(f"layers.{n}.weight", "tensor", "float32", (ranks * 2, 8), (0, 0), (2, 8), 64 * n, 64)
               for n in range(leaves)]  # fmt: skip
    entries.append(Entry("step", "tensor", "int64", (), (), (), 64 * leaves, 8))
    first = Described.of(entries, TREE, [0, "x"], {leaves: 5})
    found = {}
    for rank in range(ranks):
        row = first.row.copy()
        row[2] = 2 * rank
        found[rank] = dataclasses.replace(first, row=row, plain=[rank, "x"])
    return found


def test_what_thousands_of_ranks_hold_takes_little_memory_and_each_class_is_looked_for_once() -> None:
    told = gather_ranks(ALONE, many(3000, 500))
    olds = told.old_ranks(True, {})
    (group,) = olds.groups
    assert group.rows.nbytes == 3000 * 6 * 8 and sum(map(len, told.plain.values())) < 3000 * 60
    found = [
        olds.parts(Entry(f"layers.{n}.weight", "tensor", "float32", (6000, 8), (3, 0), (4, 8), 0, 128), 1)
        for n in range(500)
    ]
    assert {id(parts.template) for parts in found if parts is not None} == {id(found[0].template)}  # type: ignore[union-attr]
    assert [(part.rank, part.number, part.shape) for part in found[499] or ()] == [
        (1, 499, (1, 8)), (2, 499, (2, 8)), (3, 499, (1, 8)),
    ]  # fmt: skip
    assert olds[2999].plain == {"plain": 2999, "other": "x"} and olds.plain_differ == {"plain"}


STRUCTURE, ROW = RankStructure.of([Entry("w", "tensor", "float32", (4, 2), (2, 0), (2, 2), 0, 16),
                                   Entry("v", "tensor", "float32", (4, 2), (2, 0), (2, 2), 0, 16)], TREE)  # fmt: skip


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ((0, 0), 7), ((0,), ["w"]), ((1, 0), "object"), ((2, 0), "|O"), ((2, 0), None), ((3, 0), 1), ((3, 1), 2),
        ((3, 0), -1), ((4, 0), 1), ((4, 0), True), ((5, 0), -1), ((5, 0), 65), ((5, 0), 1.0), ((6,), ["e", 2]),
        ((6,), ["p", 2]), ((6,), ["x", 0]), ((7,), [2]), ((7,), [0, 0]), ((8,), ["0"]), ((0,), 5), ((6,), None),
    ],
)  # fmt: skip
def test_a_hostile_structure_is_refused(place: tuple[int, ...], value: Any) -> None:
    document = json.loads(json.dumps(STRUCTURE.document))
    node = document
    for key in place[:-1]:
        node = node[key]
    node[place[-1]] = value
    with pytest.raises(manifest.BAD_DOCUMENT):
        structure_from_document(document, 2)


@pytest.mark.parametrize("row", [[4, 2, 3, 0, 2, 2], [4, 2, -1, 0, 2, 2], [4, 2, 2, 0, 2, -1], [2**62, 2, 0, 0, 2, 2],
                                 [4, 2, 2**63 - 1, 0, 2, 2]])  # fmt: skip
def test_a_shard_outside_its_tensor_is_refused(row: list[int]) -> None:
    STRUCTURE.check_rows(ROW[None])
    with pytest.raises(ValueError, match="not inside its tensor"):
        STRUCTURE.check_rows(np.array([ROW, row]))
