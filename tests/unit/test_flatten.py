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


def described(state: Any) -> tuple[Any, ...]:
    flat = flatten(state)
    return flat.structure, [(str(type(v)), id(v) if isinstance(v, np.ndarray) else v.data_ptr()) for v in flat.values]


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
