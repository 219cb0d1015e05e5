"""What is no tensor in a state of a framework: pickled without its tensors, loaded without running code."""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import enum
import pathlib
import signal
import types
from typing import Any

import numpy as np
import pytest
import torch
from tensor_aware import Quantized

from mlflash.adapters import pickles
from mlflash.adapters.pickles import allow, apart, dump, load, together
from mlflash.errors import CorruptSlot, StateError


class Colour(enum.Enum):
    RED = 1


def twice(number: int) -> int:
    return 2 * number


def test_tensors_are_not_pickled_and_the_same_one_stays_one() -> None:
    tensor = torch.arange(1000.0)
    pickled, tensors = dump({"a": tensor, "b": [tensor], "c": torch.nn.Parameter(torch.ones(2))})
    assert len(pickled) < 500 and len(tensors) == 2 and tensors[0] is tensor
    back = load(pickled, [part.clone() for part in tensors])
    assert torch.equal(back["a"], tensor) and back["b"][0] is back["a"]
    assert isinstance(back["c"], torch.nn.Parameter) and back["c"].requires_grad


@pytest.mark.parametrize(
    "value",
    [
        argparse.Namespace(lr=1e-4, betas=(0.9, 0.95), dtype=torch.bfloat16, layout=torch.strided),
        collections.OrderedDict(a=1),
        collections.defaultdict(list, a=[1]),
        {1, 2}, frozenset({3}), b"bytes", bytearray(b"more"), slice(1, 2), complex(1, 2), None, 2**100,
        torch.Size([1, 2]), torch.device("cpu"), torch.channels_last, np.float32(1.5), np.dtype("<i4"), np.str_(""),
        np.datetime64("2020-02-03", "D"), np.bool_(True), pathlib.PosixPath("a/b"), signal.SIGUSR1,
        decimal.Decimal("1.5"), datetime.datetime(2020, 2, 3, tzinfo=datetime.timezone.utc), collections.deque([1], 2),
        types.SimpleNamespace(a=1), collections.Counter("aab"), int, [list, dict],
    ],
)  # fmt: skip
def test_what_trainings_keep_comes_back(value: Any) -> None:
    back = load(dump(value)[0], [])
    assert back == value and type(back) is type(value)


@pytest.mark.parametrize(
    "array",
    [np.arange(6, dtype=">i2").reshape(2, 3).T, np.array(5.0), np.zeros((0, 3)), np.array(["a", "bc"]),
     np.array([1, "a", None, [2]], dtype=object).reshape(2, 2)],
)  # fmt: skip
def test_arrays_in_objects_come_back_and_can_be_written(array: np.ndarray) -> None:
    back = load(dump({"in": argparse.Namespace(array=array)})[0], [])["in"].array
    assert back.dtype == array.dtype and back.shape == array.shape and np.array_equal(back, array)
    assert back.flags.writeable


@pytest.mark.parametrize("array", [np.zeros(2, dtype=[("a", "O")]), np.ma.zeros(2), np.zeros(2, dtype="i4,f8")])
def test_arrays_that_would_come_back_otherwise_are_refused_when_they_are_saved(array: np.ndarray) -> None:
    with pytest.raises(StateError, match="cannot be pickled"):
        dump([array])


def test_a_quantized_tensor_is_the_bytes_it_is_made_of() -> None:
    weight = Quantized(torch.arange(12, dtype=torch.uint8).reshape(3, 4), torch.full((3,), float("nan")))
    allow(Quantized)
    pickled, tensors = dump([weight])
    assert len(tensors) == 2
    (back,) = load(pickled, [part.clone() for part in tensors])
    assert type(back) is Quantized and torch.equal(back._raw, weight._raw)
    assert torch.equal(back._scale.view(torch.uint8), weight._scale.view(torch.uint8))


def test_a_tensor_of_an_unknown_kind_is_refused_by_name() -> None:
    class Strange(torch.Tensor):
        pass

    with pytest.raises(StateError, match="Strange does not say which tensors it is made of"):
        dump(torch.ones(2).as_subclass(Strange))
    with pytest.raises(StateError, match="cannot be pickled"):
        dump(lambda: None)


def test_a_class_of_the_training_is_loaded_where_it_was_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed: set[tuple[str, str]] = set()
    monkeypatch.setattr(pickles, "_allowed", allowed)
    unknown = "is not allowed: if you trust it, call mlflash.adapters.pickles.allow"
    for value, which in ((Colour.RED, Colour), ([twice], twice)):
        with pytest.raises(StateError, match=rf"\.{which.__name__} {unknown}"):  # at the save, not first at the load
            dump(value)
        allow(which)
        pickled, _ = dump(value)
        assert load(pickled, []) == value
        allowed.clear()
        with pytest.raises(CorruptSlot, match=rf"\.{which.__name__} {unknown}"):
            load(pickled, [])


@pytest.mark.parametrize("damage", [b"", b"\x80\x04", b"\x80\x04K\x07Q.", b"\x80\x04(((R.", bytes(range(64))])
def test_damage_is_said_to_be_that(damage: bytes) -> None:
    with pytest.raises(CorruptSlot):
        load(damage, [])


# Nests of frameworks, taken apart into what the core saves


def test_a_nest_comes_back_with_its_objects_and_the_same_tensors() -> None:
    weight, held = torch.arange(3.0), torch.ones(2)
    nest = {
        "weights": collections.OrderedDict(w=weight),
        "state": {0: {"step": torch.tensor(3.0)}, 1: {}},
        "betas": (0.9, None, [True, "text", 1 << 70]),
        "objects": [argparse.Namespace(lr=0.1, held=held), {1, 2}, torch.float16, pathlib.PurePosixPath("a/b")],
        "numbers": np.arange(4, dtype=np.int16),
    }
    state = apart(nest)
    assert state["tree"]["weights"]["w"] is weight  # no copy
    back = together(state)
    assert back.keys() == nest.keys() and back["weights"]["w"] is weight and back["state"][0]["step"] == 3
    assert back["betas"] == nest["betas"] and type(back["betas"]) is tuple
    namespace, *others = back["objects"]
    assert namespace.lr == 0.1 and namespace.held is held and others == nest["objects"][1:]
    assert np.array_equal(back["numbers"], nest["numbers"])


class Unknown:
    """No load would make one."""


@pytest.mark.parametrize("value", [Unknown(), lambda: 1, {"deep": [Unknown]}])
def test_what_no_load_would_take_is_refused_when_it_is_saved(value: Any) -> None:
    with pytest.raises(StateError):
        apart({"args": value})


def test_a_dict_that_looks_like_the_mark_of_an_object_is_refused() -> None:
    marked = apart({"object": {1, 2}})["tree"]["object"]
    with pytest.raises(StateError, match="stands for an object"):
        apart({"object": marked})


@pytest.mark.parametrize("state", [{}, {"tree": {}, "pickled": b"", "tensors": []}, {"tree": {}, "tensors": []}])
def test_a_state_that_was_not_taken_apart_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(CorruptSlot):
        together(state)


def test_an_object_that_is_not_there_is_damage() -> None:
    state = apart({"object": {1, 2}})
    with pytest.raises(CorruptSlot):
        together({**state, "pickled": apart({})["pickled"]})
