"""State ↔ leaves and tree: what goes in comes out, and what cannot go in is named."""

from __future__ import annotations

import collections
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from unit.stored import Store

from mlflash import errors
from mlflash.state import dtypes
from mlflash.state.flatten import flatten
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


plain = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=True), st.complex_numbers(allow_nan=False), st.text(),
    st.binary(),
)  # fmt: skip


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
