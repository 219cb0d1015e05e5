"""Saves with until= whose slots are not there yet, or are too small: training goes on before they are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from holds import Hold
from mpi4py import MPI

from mlflash import Checkpointer
from mlflash.saving import save_queue

pytestmark = pytest.mark.mpi
RANK = MPI.COMM_WORLD.rank
WAYS = pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])


def state_of(value: float, numbers: int = 1000) -> dict[str, Any]:
    tensor = torch.full((numbers,), value)
    return {"a": tensor, "tied": tensor, "b": torch.full((3, 5), value + RANK).t(), "c": [torch.tensor([value > 0])]}


def optimizer_of(state: dict[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD([state["a"]], lr=0.1)


def add_one(state: dict[str, Any]) -> None:
    for tensor in (state["a"], state["b"]):
        tensor.add_(1)
    state["c"][0].logical_not_()


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in "ab") and torch.equal(one["c"][0], other["c"][0])


@WAYS
def test_training_goes_on_while_slots_are_made_and_what_is_committed_is_the_state_at_the_save(
    options: dict[str, Any], hold_at: Callable[[str], Hold], shared: bool
) -> None:
    with Checkpointer(**options, replicated=shared or None) as ckpt:
        for step, numbers in ((1, 1000), (2, 500_000)):  # the first one, and one that has grown
            state = state_of(step, numbers)
            held = hold_at("room.created")
            snapshot = ckpt.save(step, state, until=optimizer_of(state))  # it would not return if it waited for room
            add_one(state)
            held.set()
            snapshot.wait()
            found, loaded = ckpt.load()
            assert found == step
            assert same(loaded, state_of(step, numbers))
            assert loaded["a"].data_ptr() == loaded["tied"].data_ptr()


@pytest.mark.parametrize("slots_only", [0, RANK])
def test_where_a_node_has_memory_for_the_slots_only_the_save_waits_for_them(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, slots_only: int
) -> None:
    if slots_only == RANK:  # on each rank, or on one of them
        monkeypatch.setattr(save_queue, "copy_to_host", lambda *_: None)
    with Checkpointer(**options) as ckpt:
        state = state_of(1)
        snapshot = ckpt.save(1, state, until=optimizer_of(state))
        add_one(state)
        snapshot.wait()
        assert same(ckpt.load()[1], state_of(1))
