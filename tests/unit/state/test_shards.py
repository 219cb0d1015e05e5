"""New shards out of old ones: every part is cut from the right place, and what cannot be had is refused."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlflash.channel.describe_ranks import Described, gather_ranks
from mlflash.errors import StructureMismatch
from mlflash.mpi.world import World
from mlflash.placement.topology import this_node
from mlflash.state.boxes import cut
from mlflash.state.leaves import Entry
from mlflash.state.old_ranks import Fragment, OldRanks, RankStructure

ALONE = World(None, this_node(), math.inf)


def entry(whole: tuple[int, ...], offset: tuple[int, ...], shape: tuple[int, ...], dtype: str = "<i4") -> Entry:
    return Entry("w", "array", dtype, whole, offset, shape, 0, 4 * math.prod(shape))


def sharding(data: Any, whole: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a tensor into a grid of shards, unequal ones and empty ones too."""
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
    for n in whole:
        inner = sorted(data.draw(st.lists(st.integers(0, n), max_size=3)))
        cuts = [0, *inner, n]
        boxes = [((*o, a), (*s, b - a)) for o, s in boxes for a, b in itertools.pairwise(cuts)]
    return boxes


class Held(NamedTuple):
    """A tensor as an old rank holds it, with a checksum of its bytes where it is whole."""

    rank: int
    entry: Entry
    check: int | None = None


def ranks_of(held: Sequence[Held], near: Collection[int] = (), compared: bool = True) -> OldRanks:
    """What ranks hold of one tensor, one entry each, as all of them tell each other."""
    described = {
        tensor.rank: Described.of([tensor.entry], ["e", 0], [], {} if tensor.check is None else {0: tensor.check})
        for tensor in held
    }
    return gather_ranks(ALONE, described).old_ranks(compared, {}, near)


def parts(want: Entry, held: Sequence[Held], rank: int, near: Collection[int] = ()) -> list[Fragment] | None:
    made = ranks_of(held, near).parts(want, rank)
    return None if made is None else [*made]


@given(data=st.data(), whole=st.lists(st.integers(1, 7), max_size=3).map(tuple))
def test_any_sharding_is_made_of_any_other(data: Any, whole: tuple[int, ...]) -> None:
    tensor = np.arange(math.prod(whole), dtype="<i4").reshape(whole)
    old = sharding(data, whole)
    copies = data.draw(st.integers(1, 2))
    held = [Held(rank, entry(whole, o, s), None if s != whole else 7) for rank, (o, s) in enumerate(old * copies)]
    for offset, shape in sharding(data, whole):
        fragments = parts(entry(whole, offset, shape), held, data.draw(st.integers(0, 9)), {0, 1})
        made = np.full(shape, -1, dtype="<i4")
        for part in fragments or ():
            source = held[part.rank].entry
            shard = tensor[tuple(slice(a, a + n) for a, n in zip(source.offset, source.shape, strict=True))]
            box = tuple(slice(a, a + n) for a, n in zip(part.source, part.shape, strict=True))
            made[tuple(slice(a, a + n) for a, n in zip(part.target, part.shape, strict=True))] = shard[box]
        wanted = tensor[tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True))]
        assert np.array_equal(made, wanted)


def test_shards_that_overlap_are_one_tensor_too() -> None:
    held = [Held(0, entry((10,), (0,), (6,))), Held(1, entry((10,), (4,), (6,)))]
    assert parts(entry((10,), (0,), (10,)), held, 0) is not None
    with pytest.raises(StructureMismatch, match="parts of this tensor are not in the checkpoint"):
        parts(entry((10,), (0,), (10,)), [held[0], Held(1, entry((10,), (7,), (3,)))], 0)
    with pytest.raises(StructureMismatch, match="not in the checkpoint"):
        ranks_of(held).parts(msgspec.structs.replace(entry((10,), (0,), (10,)), name="v"), 0)


def test_the_shards_on_this_node_are_taken_first_and_else_ranks_take_turns() -> None:
    held = [Held(rank, entry((8,), (0,), (8,)), 5) for rank in range(4)]
    assert [f.rank for f in parts(entry((8,), (0,), (8,)), held, 3, {2}) or ()] == [2]
    assert {parts(entry((8,), (0,), (8,)), held, rank)[0].rank for rank in range(4)} == {0, 1, 2, 3}  # type: ignore[index]


def test_what_each_rank_had_its_own_of_goes_to_the_rank_of_its_number() -> None:
    held = [Held(rank, entry((8,), (0,), (8,)), 100 + rank) for rank in range(2)]
    assert [f.rank for f in parts(entry((8,), (0,), (8,)), held, 1, {0}) or ()] == [1]
    assert parts(entry((8,), (0,), (8,)), held, 2) is None
    with pytest.raises(StructureMismatch, match="cannot be cut into shards"):
        parts(entry((8,), (0,), (4,)), held, 1)
    unequal = [Held(rank, entry((8 + rank,), (0,), (8 + rank,)), 7) for rank in range(2)]
    assert [f.shape for f in parts(entry((9,), (0,), (9,)), unequal, 1) or ()] == [(9,)]
    with pytest.raises(StructureMismatch, match="a tensor differs"):
        parts(entry((8,), (0,), (8,)), unequal, 1)


def test_another_tensor_of_the_name_is_refused() -> None:
    held = [Held(0, entry((8,), (0,), (8,)), 5)]
    for want in (entry((9,), (0,), (9,)), entry((8,), (0,), (8,), "<f4")):
        with pytest.raises(StructureMismatch, match="a tensor differs"):
            parts(want, held, 0)


@given(shape=st.lists(st.integers(0, 9), max_size=4).map(tuple), most=st.integers(1, 300))
def test_a_box_is_cut_into_runs_that_are_all_of_it_once(shape: tuple[int, ...], most: int) -> None:
    seen = np.zeros(shape, dtype=int)
    for offset, part in cut(shape, 4, most):
        seen[tuple(slice(a, a + n) for a, n in zip(offset, part, strict=True))] += 1
        assert math.prod(part) * 4 <= max(most, 4)
    assert (seen == 1).all()


# Very many ranks

TREE = ["d", [["plain", ["p", 0]], ["other", ["p", 1]]]]


def test_ranks_that_nobody_compared_are_not_called_private() -> None:
    tensor = Entry("w", "tensor", "float32", (4,), (0,), (4,), 0, 16)
    described = {rank: Described.of([tensor], ["e", 0], [], {}) for rank in range(3)}
    olds = gather_ranks(ALONE, described).old_ranks(False, {}, [])
    assert not olds.compared and not olds.is_private(olds.spots["w"])
    assert [part.rank for part in olds.parts(tensor, 7) or ()] == [1]
    assert [part.rank for part in olds.parts(tensor, 7, only=2) or ()] == [2]
    with pytest.raises(KeyError):
        olds[3]


STRUCTURE, ROW = RankStructure.of([Entry("w", "tensor", "float32", (4, 2), (2, 0), (2, 2), 0, 16),
                                   Entry("v", "tensor", "float32", (4, 2), (2, 0), (2, 2), 0, 16)], TREE)  # fmt: skip


@pytest.mark.parametrize("row", [[4, 2, 3, 0, 2, 2], [4, 2, -1, 0, 2, 2], [4, 2, 2, 0, 2, -1], [2**62, 2, 0, 0, 2, 2],
                                 [4, 2, 2**63 - 1, 0, 2, 2]])  # fmt: skip
def test_a_shard_outside_its_tensor_is_refused(row: list[int]) -> None:
    STRUCTURE.check_rows(ROW[None])
    with pytest.raises(ValueError, match="not inside its tensor"):
        STRUCTURE.check_rows(np.array([ROW, row]))
