"""State ↔ leaves and tree: what goes in comes out, and what cannot go in is named."""

from __future__ import annotations

import collections
import math
import sys
from typing import Any

import numpy as np
import pytest
import torch
from unit.stored import Store

from mlflash import errors
from mlflash.state import dtypes
from mlflash.state.flatten import Flattener, flatten
from mlflash.state.rebuild import compare

Point = collections.namedtuple("Point", "x y")


@pytest.fixture
def store(node_memory: Any) -> Store:
    return Store(node_memory)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        raw = [t.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, (float, np.floating)):
        return type(a) is type(b) and (a == b or (math.isnan(a) and math.isnan(b)))
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("dtype", sorted(name for name in dtypes.TORCH_ITEM_NBYTES if hasattr(torch, name)))
def test_every_torch_dtype_round_trips(store: Store, dtype: str) -> None:
    kind = getattr(torch, dtype)
    raw = torch.arange(24 * dtypes.TORCH_ITEM_NBYTES[dtype], dtype=torch.uint8)
    tensor = raw.view(kind).reshape(2, 3, 4) if dtype != "bool" else (raw % 2).view(kind).reshape(2, 3, 4)
    state = {"whole": tensor, "none of it": tensor[:0], "one": tensor[1, 1, 1]}
    store.write(state)
    assert same(store.load(), state)
    zeros = {name: torch.zeros(t.numel() * t.element_size(), dtype=torch.uint8) for name, t in state.items()}
    live = {name: zeros[name].view(kind).view(t.shape) for name, t in state.items()}
    store.fill(live)
    assert same(live, state)


def test_no_torch_dtype_is_forgotten() -> None:
    found = {str(v).removeprefix("torch.") for v in vars(torch).values() if isinstance(v, torch.dtype)}
    quantized = {"qint8", "quint8", "qint32", "quint4x2", "quint2x4"}
    sub_byte = {f"{s}int{n}" for s in ("", "u") for n in range(1, 8)}
    since_2_14 = {"bcomplex32"}
    assert found - quantized - sub_byte | since_2_14 == set(dtypes.TORCH_ITEM_NBYTES)


def test_tied_tensors_are_stored_once_and_tied_again(store: Store) -> None:
    tensor = torch.randn(50_000)
    store.write({"a": tensor, "b": [tensor], "c": tensor[:25_000], "n": tensor.numpy()})
    one, part = 200_000, 100_000
    assert store.extents.payload_nbytes < 2 * one + part + 1024  # once as a tensor, once as an array
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
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert same(other_optimizer.state_dict(), optimizer.state_dict())
    other(torch.randn(4, 20)).sum().backward()
    other_optimizer.step()  # the optimizer adopts the tensors it is given: they must not be the slot's
    assert np.array_equal(store.slot.view, before)


def test_in_place_containers_keep_their_type(store: Store) -> None:
    state = {"p": Point(1, np.zeros(2)), "o": collections.OrderedDict(a=1), "s": (1, 2)}
    store.write({"p": Point(5, np.ones(2)), "o": collections.OrderedDict(a=6), "s": (7, 8)})
    array = state["p"].y
    store.fill(state)
    assert state["p"] == Point(5, array) and state["p"].y is array and array.tolist() == [1, 1]
    assert type(state["o"]) is collections.OrderedDict and state["o"] == {"a": 6}
    assert state["s"] == (7, 8)


@pytest.mark.parametrize(
    ("leaf", "path", "found"),
    [
        ({"model": {"layers": [object()]}}, "model.layers.0", "builtins.object"),
        ({"s": {1, 2}}, "s", "builtins.set"),
        ({"f": print}, "f", "builtin"),
        ({"o": np.array([object()])}, "o", "object"),
        ({"m": torch.empty(3, device="meta")}, "m", "meta"),
        ({"sp": torch.eye(3).to_sparse()}, "sp", "sparse"),
        ({"k": {object(): 1}}, "k (a key)", "object"),
    ],
)
def test_an_unknown_leaf_is_refused_with_its_path(leaf: Any, path: str, found: str) -> None:
    with pytest.raises(errors.StateError) as caught:
        flatten(leaf)
    assert caught.value.tensor == path
    assert found in str(caught.value)


def test_a_state_that_contains_itself_is_refused() -> None:
    state: dict[str, Any] = {"a": []}
    state["a"].append(state)
    with pytest.raises(errors.StateError, match="contains itself"):
        flatten(state)


def test_a_changed_structure_names_both_sides(store: Store) -> None:
    store.write({"w": torch.zeros(3, 4), "old": 1, "l": [1, 2], "t": torch.zeros(2), "p": 3})
    live = {"w": torch.zeros(4, 4), "new": 1, "l": [1, 2, 3], "t": torch.zeros(2).half(), "p": {}}
    found = compare(live, store.manifest.tree, store.manifest.entries)
    assert "w: tensor float32 [3, 4] in the checkpoint, tensor float32 [4, 4] in the state given" in found
    assert "new: in the state given, not in the checkpoint" in found
    assert "old: in the checkpoint, not in the state given" in found
    assert "l: 2 items in the checkpoint, 3 in the state given" in found
    assert "t: tensor float32 [2] in the checkpoint, tensor float16 [2] in the state given" in found
    assert "p: a plain value in the checkpoint, a dict in the state given" in found
    assert len(found) == 6


def test_layout_is_reused_while_the_structure_is_the_same(store: Store) -> None:
    tensors = [torch.randn(10) for _ in range(5)]
    first = store.stage.plan(flatten({"t": tensors, "step": 1}))
    second = store.stage.plan(flatten({"t": [t + 1 for t in tensors], "step": 2}))
    assert first.layout is second.layout
    third = store.stage.plan(flatten({"t": tensors[:4], "step": 2}))
    assert third.layout is not second.layout


def test_a_plain_leaf_that_grows_past_its_room_gets_a_new_layout(store: Store) -> None:
    first = store.stage.plan(flatten({"log": "x"}))
    second = store.stage.plan(flatten({"log": "x" * 100_000}))
    assert second.layout.extents.manifest_room > 100_000 > first.layout.extents.manifest_room


# A state that is taken apart again


class Counted:
    """An object with a state; it counts how often it was asked."""

    def __init__(self, state: dict[str, Any], private: bool = False):
        self.state, self.rank_private, self.asked = state, private, 0

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def some_state() -> dict[str, Any]:
    weight = torch.randn(4, 6)
    return {
        "model": collections.OrderedDict(weight=weight, tied=weight, bias=torch.nn.Parameter(torch.randn(3))),
        "array": np.arange(5),
        "more": [1, None, ("a", 2.5), {3: torch.ones(2, dtype=torch.bfloat16), True: 1 + 2j}],
        "object": Counted({"x": torch.zeros(2), "n": 7}),
        "empty": torch.zeros(0),
    }


def test_objects_are_asked_once_also_where_the_state_has_changed() -> None:
    state, flattener = some_state(), Flattener()
    flattener.flatten(state)
    state["model"]["new"] = torch.ones(1)
    state["zz"] = state.pop("empty")
    flattener.flatten(state)
    state["other"] = 1  # behind the object: it has been asked when this is seen
    state["object"].state["x"] = torch.ones(3)
    flattener.flatten(state)
    assert state["object"].asked == 3


@pytest.mark.parametrize("error", [errors.StateError("this cannot be saved"), ZeroDivisionError()], ids=repr)
def test_an_object_that_raises_is_not_asked_again(error: Exception) -> None:
    class Trap(Counted):
        trapped = False

        def state_dict(self) -> dict[str, Any]:
            found = super().state_dict()
            if self.trapped:
                raise error
            return found

    flattener, trap = Flattener(), Trap({"x": torch.zeros(2)})
    flattener.flatten({"first": trap})
    trap.trapped = True
    with pytest.raises(type(error)):
        flattener.flatten({"first": trap})
    assert trap.asked == 2  # other ranks may be in a collective of it, once each


def test_to_know_a_state_takes_a_small_part_of_the_calls_to_describe_it() -> None:
    state = {"model": {f"layer.{i}.weight": torch.zeros(8) for i in range(3000)}}
    flattener = Flattener()

    def calls(look: Any) -> int:
        events: collections.Counter[str] = collections.Counter()
        sys.setprofile(lambda frame, event, arg: events.update([event]))
        try:
            look(state)
        finally:
            sys.setprofile(None)
        return events["call"] + events["c_call"]

    flattener.flatten(state)
    assert calls(flattener.flatten) < 0.1 * calls(flatten)
