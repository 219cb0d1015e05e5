"""Which checksums of a slot are made along with its copies, and which are left to the courier as a 0."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
from unit.stored import Store

from mlflash.memory.copy_threads import CopyThreads
from mlflash.memory.slot import checks_of
from mlflash.protect.transfer import Source
from mlflash.save.deferred_copies import Computed, DeferredCopies
from mlflash.save.stage import StagedState
from mlflash.state.flatten import flatten

BLOCK_NBYTES = 4096
NUMBERS = 20_000  # 80 kB of float32: 20 blocks, the first and last of which a neighbour shares


@pytest.fixture
def store(node_memory: Any) -> Store:
    return Store(node_memory)


def stage(store: Store, state: Any, lazy: Any = ()) -> DeferredCopies | None:
    """Stage a state twice, so that the table has numbers of the first time; ``lazy``: names of what is copied later."""
    store.write(state)
    flat = flatten(state)
    names = [entry.name for entry in flat.structure.entries]
    later = {names.index(name): owner for name, owner in dict(lazy).items()}
    copies: DeferredCopies | None = store.stage.copy(flat, store.stage.plan(flat), store.slot, lazy=later)[1]
    return copies


def unchecked(store: Store) -> list[int]:
    """The blocks without a checksum; those of all others are right."""
    table = store.slot.table(store.extents)
    made = checks_of(store.slot.body(store.extents), BLOCK_NBYTES)
    assert all(table[block] in (0, made[block]) for block in range(store.extents.blocks))
    return np.flatnonzero(table == 0).tolist()


def blocks_of(store: Store, name: str) -> list[int]:
    (entry,) = [entry for entry in store.manifest.entries if entry.name == name]
    start = store.extents.manifest_room + entry.start
    return list(range(start // BLOCK_NBYTES, -(-(start + entry.nbytes) // BLOCK_NBYTES)))


def test_all_checksums_of_a_state_in_the_hosts_memory_are_made_with_its_copies(store: Store) -> None:
    wide = torch.randn(NUMBERS // 10, 20)
    state = {
        "a": torch.randn(NUMBERS), "small": torch.arange(7), "strided": wide[:, ::2], "flipped": wide.t(),
        "empty": torch.empty(0), "conj": torch.randn(100, dtype=torch.complex64).conj(), "flags": torch.ones(5).bool(),
        "array": np.random.default_rng(0).random(NUMBERS), "rows": np.arange(NUMBERS)[::2], "step": 3,
    }  # fmt: skip
    state["tied"] = state["a"]
    assert stage(store, state) is None and unchecked(store) == []
    torch.testing.assert_close(store.load()["conj"].resolve_conj(), state["conj"].resolve_conj(), rtol=0, atol=0)
    assert np.array_equal(store.load()["rows"], state["rows"])


def test_a_block_is_checked_when_the_last_of_it_was_copied(store: Store) -> None:
    state = {"before": torch.randn(NUMBERS), "late": torch.randn(NUMBERS), "after": torch.randn(NUMBERS)}
    copies = stage(store, state, {"late": state["late"]})
    assert copies is not None and unchecked(store) == blocks_of(store, "late")
    copies.finish()
    assert copies.error is None and unchecked(store) == []
    assert torch.equal(store.load()["late"], state["late"])


def test_what_is_computed_later_is_left_to_the_courier(store: Store) -> None:
    state = {"before": torch.randn(NUMBERS), "sum": np.zeros(4), "after": torch.randn(NUMBERS)}
    copies = stage(store, state, {"sum": Computed(lambda: np.ones(4), ()), "after": state["after"]})
    assert copies is not None
    copies.finish()
    assert unchecked(store) == blocks_of(store, "sum") and store.load()["sum"].tolist() == [1] * 4


@pytest.mark.parametrize("is_late", [False, True])
def test_what_is_written_into_a_staged_state_is_left_to_the_courier(store: Store, is_late: bool) -> None:
    state = {"blank": torch.zeros(100, dtype=torch.uint8), "weight": torch.randn(NUMBERS)}
    copies = stage(store, state, {"weight": state["weight"]} if is_late else {})
    plan = store.stage.plan(flatten(state))
    staged = StagedState(store.slot, store.slot, plan, 0, {}, copies)
    assert staged.write(0, b"index") and not staged.write(0, bytes(101))
    staged.finish()
    assert unchecked(store) == blocks_of(store, "blank")
    assert bytes(store.load()["blank"][:6]) == b"index\0"


@pytest.mark.parametrize("threads", [1, 3])
def test_checksums_of_an_earlier_content_count_for_nothing(store: Store, threads: int) -> None:
    stage(store, {"weight": torch.randn(NUMBERS)})
    assert unchecked(store) == []
    store.slot.unseal()  # then it is filled by something that makes no checksums
    store.slot.payload(store.extents)[:] = 7
    examined: list[int] = []
    with contextlib.closing(CopyThreads(threads)) as copy_threads:
        Source(store.slot, store.extents, lambda check: None, examine=examined.append, copy_threads=copy_threads).seal()
    assert unchecked(store) == [] and examined[-1] == store.extents.blocks
