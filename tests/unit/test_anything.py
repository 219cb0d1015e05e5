"""Nests of frameworks, taken apart into what the core saves and put together again."""

from __future__ import annotations

import argparse
import collections
import pathlib
from typing import Any

import numpy as np
import pytest
import torch

from mlflash.adapters.pickles import apart, together
from mlflash.errors import CorruptSlot, StateError


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
