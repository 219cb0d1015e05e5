"""State dicts of DCP that are laid out by what is known of the one before, beside the same laid out from nothing."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlflash.adapters.dcp.staged import Laid, Layouts
from mlflash.errors import StateError

ROOM = (0, 0)
SHAPES = ((), (3,), (2, 3), (0, 2))


class Own:
    """Saves itself: nobody but DCP may ask it."""

    def state_dict(self) -> dict[str, Any]:
        raise AssertionError("it was asked for its state")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("it was given a state")


def alike(one: Laid, other: Laid) -> None:
    assert (one.keys, one.shapes) == (other.keys, other.shapes)
    assert one.flat.structure == other.flat.structure
    assert len(one.flat.values) == len(other.flat.values)
    for mine, its in zip(one.flat.values[2:], other.flat.values[2:], strict=True):
        assert (mine.data_ptr(), mine.shape, mine.dtype, mine.stride()) == (
            its.data_ptr(), its.shape, its.dtype, its.stride())  # fmt: skip


def made(shape: tuple[int, ...], dtype: torch.dtype, how: str) -> torch.Tensor:
    tensor = torch.ones(shape).to(dtype)
    if how == "strided":
        return tensor.new_ones((4, 3)).t()
    return torch.nn.Parameter(tensor) if how == "parameter" and dtype.is_floating_point else tensor


TENSORS = st.builds(made, st.sampled_from(SHAPES), st.sampled_from((torch.float32, torch.bfloat16, torch.int64)),
                    st.sampled_from(("plain", "strided", "parameter")))  # fmt: skip
VALUES = st.recursive(
    st.one_of(TENSORS, st.integers(0, 3), st.just("text"), st.builds(Own), st.tuples(TENSORS)),
    lambda sub: st.one_of(st.lists(sub, max_size=3), st.dictionaries(st.sampled_from("abc"), sub, max_size=3)),
    max_leaves=8,
)


@settings(deadline=None)
@given(states=st.lists(st.dictionaries(st.sampled_from("xyz"), VALUES, max_size=3), min_size=1, max_size=3),
       again=st.lists(st.integers(0, 2), max_size=5))  # fmt: skip
def test_any_state_dicts_one_after_the_other_are_laid_out_as_from_nothing(
    states: list[dict[str, Any]], again: list[int]
) -> None:
    layouts = Layouts()
    for state in [*states, *(states[number % len(states)] for number in again)]:
        alike(layouts.lay_out(state, ROOM), Layouts().lay_out(state, ROOM))


def test_a_tensor_without_memory_is_refused_though_the_rest_is_known() -> None:
    layouts = Layouts()
    state = {"a": torch.zeros(3), "b": torch.zeros(3)}
    layouts.lay_out(state, ROOM)
    state["b"].untyped_storage().resize_(0)
    with pytest.raises(StateError, match="no memory"):
        layouts.lay_out(state, ROOM)


def test_no_tensor_is_kept_alive_by_what_is_known() -> None:
    layouts = Layouts()
    state = {"a": torch.zeros(3)}
    alive = weakref.ref(state["a"])
    layouts.lay_out(state, ROOM)
    layouts.lay_out(state, ROOM)
    del state
    gc.collect()
    assert alive() is None
