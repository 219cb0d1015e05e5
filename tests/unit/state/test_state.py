"""State ↔ leaves and tree: what goes in comes out, and what cannot go in is named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from states import differences
from unit.stored import Store

from mlflash import errors
from mlflash.state import leaves
from mlflash.state.flatten import Flattener, flatten
from mlflash.state.rebuild import compare


@pytest.fixture
def store(node_memory: Any) -> Store:
    return Store(node_memory)


@pytest.mark.parametrize("dtype", sorted(name for name in leaves.TORCH_ITEM_NBYTES if hasattr(torch, name)))
def test_every_torch_dtype_round_trips(store: Store, dtype: str) -> None:
    kind = getattr(torch, dtype)
    raw = torch.arange(24 * leaves.TORCH_ITEM_NBYTES[dtype], dtype=torch.uint8)
    tensor = raw.view(kind).reshape(2, 3, 4) if dtype != "bool" else (raw % 2).view(kind).reshape(2, 3, 4)
    state = {"whole": tensor, "none of it": tensor[:0], "one": tensor[1, 1, 1]}
    store.write(state)
    assert differences(state, store.load(), "", loaded=True) == []
    zeros = {name: torch.zeros(t.numel() * t.element_size(), dtype=torch.uint8) for name, t in state.items()}
    live = {name: zeros[name].view(kind).view(t.shape) for name, t in state.items()}
    store.fill(live)
    assert differences(state, live, "", loaded=False) == []


def test_no_torch_dtype_is_forgotten() -> None:
    dtypes = {str(v).removeprefix("torch.") for v in vars(torch).values() if isinstance(v, torch.dtype)}
    quantized = {"qint8", "quint8", "qint32", "quint4x2", "quint2x4"}
    sub_byte = {f"{s}int{n}" for s in ("", "u") for n in range(1, 8)}
    since_2_14 = {"bcomplex32"}
    assert dtypes - quantized - sub_byte | since_2_14 == set(leaves.TORCH_ITEM_NBYTES)


def test_tied_tensors_are_stored_once_and_tied_again(store: Store) -> None:
    tensor = torch.randn(50_000)
    store.write({"a": tensor, "b": [tensor], "c": tensor[:25_000], "n": tensor.numpy()})
    tensor_nbytes, part = 200_000, 100_000
    assert store.extents.payload_nbytes < 2 * tensor_nbytes + part + 1024  # once as a tensor, once as an array
    loaded = store.load()
    assert loaded["a"] is loaded["b"][0]
    loaded["a"][0] = 7.0
    assert loaded["c"][0] != 7.0


def test_objects_get_copies_through_load_state_dict(store: Store) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.BatchNorm1d(30))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 20)).sum().backward()
    optimizer.step()
    store.write({"model": model, "optimizer": optimizer})
    before = store.slot.view.copy()
    other = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.BatchNorm1d(30))
    other_optimizer = torch.optim.AdamW(other.parameters())
    store.fill({"model": other, "optimizer": other_optimizer})
    assert differences(model.state_dict(), other.state_dict(), "", loaded=False) == []
    assert differences(optimizer.state_dict(), other_optimizer.state_dict(), "", loaded=False) == []
    other(torch.randn(4, 20)).sum().backward()
    other_optimizer.step()  # the optimizer adopts the tensors it is given: they must not be the slot's
    assert np.array_equal(store.slot.view, before)


def test_a_state_that_contains_itself_is_refused() -> None:
    state: dict[str, Any] = {"a": []}
    state["a"].append(state)
    with pytest.raises(errors.StateError, match="contains itself"):
        flatten(state)


def test_a_changed_structure_names_both_sides(store: Store) -> None:
    store.write({"w": torch.zeros(3, 4), "old": 1, "l": [1, 2], "t": torch.zeros(2), "p": 3})
    live = {"w": torch.zeros(4, 4), "new": 1, "l": [1, 2, 3], "t": torch.zeros(2).half(), "p": {}}
    differences = compare(live, store.manifest.tree, store.manifest.entries)
    assert "w: tensor float32 [3, 4] in the checkpoint, tensor float32 [4, 4] in the state given" in differences
    assert "new: in the state given, not in the checkpoint" in differences
    assert "old: in the checkpoint, not in the state given" in differences
    assert "l: 2 items in the checkpoint, 3 in the state given" in differences
    assert "t: tensor float32 [2] in the checkpoint, tensor float16 [2] in the state given" in differences
    assert "p: a plain value in the checkpoint, a dict in the state given" in differences
    assert len(differences) == 6


# A state that is taken apart again


class Counted:
    """An object with a state; it counts how often it was asked."""

    def __init__(self, state: dict[str, Any]):
        self.state, self.asked = state, 0

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_objects_are_asked_once_also_where_the_state_has_changed() -> None:
    flattener, counted = Flattener(), Counted({"x": torch.zeros(2), "n": 7})
    state: dict[str, Any] = {"model": {"w": torch.ones(2)}, "object": counted, "empty": torch.zeros(0)}
    flattener.flatten(state)
    state["model"]["new"] = torch.ones(1)
    state["zz"] = state.pop("empty")
    flattener.flatten(state)
    state["other"] = 1  # behind the object: it has been asked when this is seen
    counted.state["x"] = torch.ones(3)
    flattener.flatten(state)
    assert counted.asked == 3


@pytest.mark.parametrize("error", [errors.StateError("this cannot be saved"), ZeroDivisionError()], ids=repr)
def test_an_object_that_raises_is_not_asked_again(error: Exception) -> None:
    class Trap(Counted):
        trapped = False

        def state_dict(self) -> dict[str, Any]:
            state = super().state_dict()
            if self.trapped:
                raise error
            return state

    flattener, trap = Flattener(), Trap({"x": torch.zeros(2)})
    flattener.flatten({"first": trap})
    trap.trapped = True
    with pytest.raises(type(error)):
        flattener.flatten({"first": trap})
    assert trap.asked == 2  # other ranks may be in a collective of it, once each
