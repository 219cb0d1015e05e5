"""A state that is taken apart again: what is like the one before is known at once, what is not is described anew."""

from __future__ import annotations

import collections
import sys
from typing import Any

import numpy as np
import pytest
import torch

from mlflash.errors import StateError
from mlflash.state.flatten import Flattener, flatten


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


CHANGES: dict[str, Any] = {
    "nothing": lambda s: None,
    "values": lambda s: (s["model"]["weight"].add_(1), s["array"].__iadd__(1), s["more"].__setitem__(0, 2)),
    "another tensor": lambda s: s["model"].__setitem__("bias", torch.nn.Parameter(torch.ones(3))),
    "class": lambda s: s["model"].__setitem__("bias", torch.ones(3)),
    "shape": lambda s: s["model"].__setitem__("bias", torch.nn.Parameter(torch.ones(4))),
    "dtype": lambda s: s["model"].__setitem__("bias", torch.nn.Parameter(torch.ones(3, dtype=torch.float64))),
    "data": lambda s: setattr(s["model"]["bias"], "data", torch.ones(5)),
    "strides": lambda s: s["model"].__setitem__("weight", torch.randn(6, 4).t()),
    "no tie": lambda s: s["model"].__setitem__("tied", torch.randn(4, 6)),
    "order": lambda s: s["model"].move_to_end("weight"),
    "key": lambda s: s["model"].__setitem__("new", torch.ones(1)),
    "fewer": lambda s: s["more"].pop(),
    "list to tuple": lambda s: s.__setitem__("more", tuple(s["more"])),
    "dict class": lambda s: s.__setitem__("model", dict(s["model"])),
    "number to tensor": lambda s: s["more"].__setitem__(0, torch.ones(1)),
    "tensor to number": lambda s: s.__setitem__("empty", 5),
    "number to list": lambda s: s["more"].__setitem__(0, [1]),
    "type of a number": lambda s: s["more"].__setitem__(0, 1.0),
    "array": lambda s: s.__setitem__("array", np.arange(6)),
    "array's dtype": lambda s: s.__setitem__("array", np.arange(5, dtype=np.int16)),
    "array to tensor": lambda s: s.__setitem__("array", torch.arange(5)),
    "state of the object": lambda s: s["object"].state.update(y=torch.ones(1)),
    "object to dict": lambda s: s.__setitem__("object", s["object"].state),
    "private": lambda s: setattr(s["object"], "rank_private", True),
}
SAME = {"nothing", "values", "another tensor", "type of a number"}


def described(state: Any) -> tuple[Any, ...]:
    flat = flatten(state)
    return flat.structure, [(str(type(v)), id(v) if isinstance(v, np.ndarray) else v.data_ptr()) for v in flat.values]


@pytest.mark.parametrize("change", CHANGES)
def test_a_state_taken_apart_again_is_as_if_it_was_the_first_time(change: str) -> None:
    state, flattener = some_state(), Flattener()
    first = flattener.flatten(state)
    CHANGES[change](state)
    again, fresh = flattener.flatten(state), flatten(state)
    assert (again.structure is first.structure) == (change in SAME)
    assert again.structure == fresh.structure and again.plain == fresh.plain
    for one, other in zip(again.values, fresh.values, strict=True):
        if isinstance(one, np.ndarray):
            assert one is other
        else:
            assert (one.data_ptr(), one.stride(), one.dtype) == (other.data_ptr(), other.stride(), other.dtype)
    third = flattener.flatten(state)  # what was described anew is known from then on
    assert third.structure is again.structure


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


@pytest.mark.parametrize("value", [torch.ones(2).to_sparse(), torch.ones(2, device="meta"), object()])
def test_what_cannot_be_saved_is_refused_as_the_first_time(value: Any) -> None:
    state, flattener = some_state(), Flattener()
    flattener.flatten(state)
    state["model"]["weight"] = value
    with pytest.raises(StateError) as refused:
        flattener.flatten(state)
    assert refused.value.tensor == "model.weight"
    state["model"]["weight"] = torch.randn(4, 6)
    assert flattener.flatten(state).structure == flatten(state).structure


@pytest.mark.parametrize("error", [StateError("this cannot be saved"), ZeroDivisionError()], ids=repr)
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


def test_tensors_of_classes_of_their_own_are_described_each_time() -> None:
    class Own(torch.Tensor):
        pass

    state, flattener = {"own": torch.ones(2).as_subclass(Own), "x": torch.ones(1)}, Flattener()
    first, second = flattener.flatten(state), flattener.flatten(state)
    assert first.structure == second.structure and first.structure is not second.structure


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
