"""The choice of what to restore, and who takes over which file."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from unit.layouts import layout

from mlflash.commit.earlier_runs import ParityGroup, choose
from mlflash.memory.inventory import FOUND, Inventory, WantedStep, encode, join
from mlflash.memory.node_directory import file_name
from mlflash.memory.slot import Attempt, Kind
from mlflash.memory.slot_pool import assign
from mlflash.placement.redundancy import parse, place

RUN_A, RUN_B = b"a" * 16, b"b" * 16
RUN_NUMBERS = (0x3F9C_11D7_A6E2_5B48, 0xC471_0E8D_92F3_6AB5)  # no pattern in them, as in a real one


def table(*rows: tuple[bytes, int, int, int, int, int], world_size: int = 2) -> Inventory:
    """Rows of (run id, generation, step, rank, node, file)."""
    run = {RUN_A: int.from_bytes(b"a" * 8, "little"), RUN_B: int.from_bytes(b"b" * 8, "little")}
    return Inventory(
        np.array(
            [(g, run[r], run[r], s, k, world_size, n, f, 0, -1, *[0] * 5) for r, g, s, k, n, f in rows], dtype=FOUND
        )
    )


def with_parity(stock: Inventory, group: tuple[int, ...], losses: int, *places: tuple[int, int, int]) -> Inventory:
    """An inventory, and parity files of its only attempt as (rank, node, file)."""
    rows = np.zeros(len(places), dtype=FOUND)
    rows[:] = stock.rows[0]
    for row, (rank, node, file) in zip(rows, places, strict=True):
        row["rank"], row["node"], row["file"], row["kind"], row["number"] = rank, node, file, Kind.PARITY, losses
    return join([stock, Inventory(rows, (group,))])


def with_shares(stock: Inventory, files: set[int], number: int) -> Inventory:
    """An inventory in which some files are shares."""
    rows = stock.rows.copy()
    some = np.isin(rows["file"], list(files))
    rows["kind"][some], rows["shared_by"][some], rows["number"][some], rows["shares"][some] = Kind.SHARE, 0, number, 4
    return Inventory(rows, stock.groups)


def test_the_newest_attempt_with_a_slot_for_every_rank_is_chosen() -> None:
    stock = table((RUN_A, 1, 10, 0, 0, 0), (RUN_A, 1, 10, 1, 1, 0), (RUN_A, 2, 20, 0, 0, 1))
    choice = choose(stock, (0, 1))
    assert choice is not None
    assert (choice.step, choice.attempt, choice.source) == (10, Attempt(RUN_A, 1), ((0, 0), (1, 0)))


def test_a_step_can_be_asked_for() -> None:
    stock = table(*((RUN_A, g, 10 * g, r, r, g) for g in (1, 2) for r in (0, 1)))
    assert choose(stock, (0, 1), WantedStep(10)).step == 10  # type: ignore[union-attr]
    assert choose(stock, (0, 1), WantedStep(15)) is None
    assert [(a.generation, s, n) for a, s, n in stock.attempts()] == [(2, 20, 2), (1, 10, 2)]


def names(*numbers: int) -> list[str]:
    return [file_name(n) for n in numbers]


def test_the_certified_state_of_a_rank_fills_no_slot_for_the_copies_of_another_one() -> None:
    # Rank 0's own slots, of which the certified one has the largest number, and fewer copies of rank 1's.
    rows = [(RUN_A, 4, 40, 0, 0, 3), (RUN_A, 3, 30, 0, 0, 2), (RUN_A, 3, 30, 0, 0, 4), (RUN_A, 2, 20, 0, 0, 6),
            (RUN_A, 4, 40, 1, 0, 8), (RUN_A, 2, 20, 1, 0, 7)]  # fmt: skip
    here = names(2, 3, 4, 6, 7, 8)
    files, unused = assign(table(*rows), here, Attempt(RUN_A, 4), True, {0: [1]}, {}, 5, 4, older=[Attempt(RUN_A, 2)])
    assert (files[0].own, files[0].inbox, unused) == ([3, 6, 2, None, None], {1: [8, 7, 4, None]}, [])


@given(data=st.data())
def test_files_are_shared_out_once_each_and_one_of_each_pair_can_be_written(data: Any) -> None:
    ranks = data.draw(st.integers(1, 4))
    holders = data.draw(st.lists(st.integers(0, ranks - 1), min_size=ranks, max_size=ranks))
    owners = [[q for q in range(ranks) if holders[q] == r] for r in range(ranks)]
    count = data.draw(st.integers(0, 18))
    rows = [
        (RUN_A, data.draw(st.integers(1, 2)), 10, data.draw(st.integers(0, ranks)), 0, n)
        for n in range(count)
        if data.draw(st.booleans())
    ]
    stock = table(*rows)
    here = sorted(data.draw(st.sets(st.integers(0, ranks - 1), min_size=1)))
    shares = {rank: (0, n) for n, rank in enumerate(here) if data.draw(st.booleans())}
    stock = with_shares(stock, data.draw(st.sets(st.integers(0, 17))), data.draw(st.integers(0, 3)))
    inboxes = {rank: owners[rank] for rank in here}
    files, unused = assign(stock, names(*range(count)), Attempt(RUN_A, 2), True, inboxes, shares)
    chosen = {n for _, g, _, _, _, n in rows if g == 2}
    pairs = [pair for f in files.values() for pair in [f.own, f.share, *f.inbox.values()]]
    shared = [n for pair in pairs for n in pair if n is not None]
    assert sorted([*shared, *unused]) == list(range(count))
    assert not any(pair[0] in chosen and pair[1] in chosen for pair in pairs)


def test_what_16384_ranks_tell_each_other_is_less_than_a_megabyte() -> None:
    placed = place(layout(*[8] * 2048), parse("rs:6+2"))
    total = 0
    for node in range(2048):
        ranks = range(8 * node, 8 * node + 8)
        rows = np.zeros(48, dtype=FOUND)  # three own slots and three parity files of each rank
        rows["rank"], rows["world_size"], rows["node"] = np.repeat(ranks, 6), 16_384, node
        rows["file"], rows["generation"] = np.arange(48), np.tile([41, 41, 42, 42, 43, 43], 8)
        rows["step"], rows["run_0"], rows["run_1"] = 10 * rows["generation"], *RUN_NUMBERS
        rows["group"], rows["number"], rows["shared_by"] = np.repeat(range(8), 6), np.tile([0, 2], 24), -1
        rows["kind"] = np.tile([Kind.SLOT, Kind.PARITY], 24)
        total += len(encode(Inventory(rows, tuple(placed.parity_group_of[rank] for rank in ranks))))
    assert total < 1_000_000


def test_a_step_needs_every_share_of_what_its_slots_share() -> None:
    rows = table(*((RUN_A, g, 10 * g, rank, rank, 2 * g) for g in (1, 2) for rank in (0, 1))).rows
    rows["shared_by"] = 0
    shares = [(1, 0, 0, 7), (1, 1, 1, 7), (2, 0, 0, 8), (2, 1, 1, 8), (2, 0, 1, 9)]  # generation, number, node, file
    files = np.repeat(rows[:1], len(shares))
    for row, (generation, number, node, file) in zip(files, shares, strict=True):
        row["generation"], row["step"] = generation, 10 * generation
        row["number"], row["node"], row["file"] = number, node, file
    files["kind"], files["shares"] = Kind.SHARE, 2
    stock = Inventory(np.concatenate([rows, files]))
    choice = choose(stock, (0, 1))
    assert choice is not None and choice.step == 20
    assert choice.shares == {(0, 0): ((0, 8), (1, 9)), (0, 1): ((1, 8),)}
    assert choose(stock.without([(0, 8)]), (0, 1)).step == 20  # type: ignore[union-attr]
    assert choose(stock.without([(1, 8)]), (0, 1)).step == 10  # type: ignore[union-attr]
    assert choose(stock.without([(1, 8), (0, 7)]), (0, 1)) is None


def slots(world_size: int, *ranks: int) -> Inventory:
    """Slots of some ranks, each on its own node."""
    return table(*((RUN_A, 1, 10, rank, rank, 0) for rank in ranks), world_size=world_size)


def test_a_rank_without_a_slot_is_rebuilt_where_enough_of_its_group_is_there() -> None:
    group = (0, 1, 2, 3)
    stock = with_parity(slots(4, 0, 2, 3), group, 1, (0, 0, 1), (2, 2, 1), (3, 3, 1))
    choice = choose(stock, (0, 1, 2, 3))
    assert choice is not None
    files = ParityGroup(group, 1, ((0, 1), None, (2, 1), (3, 1)))
    assert (choice.source, choice.rebuilt) == (((0, 0), None, (2, 0), (3, 0)), {1: files})
    assert choice.group_of(2) == files
    two_lost = with_parity(slots(4, 2, 3), group, 1, (2, 2, 1), (3, 3, 1))
    assert choose(two_lost, (0, 1, 2, 3)) is None
    assert choose(with_parity(slots(4, 2, 3), group, 2, (2, 2, 1), (3, 3, 1)), (0, 1, 2, 3)) is not None
    # The slot of one member and the parity of another: one stripe has lost both.
    assert choose(with_parity(slots(4, 0, 2, 3), group, 1, (0, 0, 1), (1, 1, 1), (3, 3, 1)), (0, 1, 2, 3)) is None
    # With all slots there, no parity is needed.
    assert choose(with_parity(slots(4, 0, 1, 2, 3), group, 1, (0, 0, 1)), (0, 1, 2, 3)).rebuilt == {}  # type: ignore[union-attr]
