"""Any state is refused by its path, or comes back equal, type for type and bit for bit; fixed cases were found so.

tests/programs/test_trainings.py does the same on ranks and in a new process.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import states
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from states import Built, Spec, changed, differences, untied
from torch.testing._internal.distributed.fake_pg import FakeStore
from unit.stored import Store

from mlflash.errors import StateError
from mlflash.memory.node_directory import NodeDirectory
from mlflash.state.flatten import flatten


@pytest.fixture(autouse=True, scope="module")
def one_of_four_ranks() -> Iterator[None]:
    """DTensors are on meshes of these; nobody communicates."""
    torch.distributed.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    yield
    torch.distributed.destroy_process_group()
    states.meshes.cache_clear()


def check(*specs: Spec) -> None:
    """Save states one after the other, as a training does, and read each."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        memory = NodeDirectory(directory, "j")
        try:
            store = Store(memory)
            for spec in specs:
                check_one(store, spec)
        finally:
            memory.close()


def check_one(store: Store, spec: Spec) -> None:
    built = Built(spec)
    try:
        store.write(built.state)
    except StateError as refused:
        assert refused.tensor in built.doubtful, refused
        return
    loaded = store.load()
    assert differences(built.state, loaded, "", loaded=True) == []
    assert untied(built.state, loaded) == []
    blank = Built(spec, blank=True).state
    store.fill(blank)
    assert differences(built.state, blank, "", loaded=False) == []


@settings(max_examples=states.EXAMPLES or 60, suppress_health_check=list(HealthCheck))
@given(spec=states.specs(), by=st.integers(0, 99))
def test_any_state_is_refused_by_its_path_or_comes_back_equal(spec: Spec, by: int) -> None:
    check(spec, changed(spec, by), spec)


def tensor(dtype: str, shape: tuple[int, ...], view: str = "plain", wrap: str = "", seed: int = 3) -> Spec:
    return "tensor", dtype, shape, view, seed, wrap


def keyed(key: Any) -> Spec:
    return "dict", "dict", ((key, ("plain", 1)),)


@pytest.mark.parametrize(
    "spec",
    [
        *(("odd", name) for name in states.ODD),
        *(tensor(dtype, (n,)) for dtype in states.STRANGE_DTYPES for n in (2, states.LARGE)),
        *(("array", n, (2,), "plain", 3, "") for n, dtype in enumerate(states.NUMPY_DTYPES) if n not in states.BYTES),
        *(("array", states.BYTES[0], (2,), "plain", 3, wrap) for wrap in ("masked", "own")),
        *map(keyed, (float("nan"), np.datetime64("NaT"), (1, float("nan")), complex(0, float("nan")))),
        keyed(states.Point(1, 2)), ("plain", np.longlong(1)), tensor("float32", (3,), wrap="wrapper"),
        ("deep", 250, ("plain", 1)),
    ],
    ids=lambda spec: ascii(spec)[:60],
)  # fmt: skip
def test_what_would_come_back_as_something_else_is_refused_by_its_path(spec: Spec) -> None:
    built = Built(("list", (("plain", 1), spec)))
    with pytest.raises(StateError) as refused:
        flatten(built.state)
    assert refused.value.tensor in built.doubtful | {"state.1", "state.1 (a key)"}


@pytest.mark.parametrize(
    "specs",
    [
        [("plain", np.str_("a\0"))],
        [("plain", np.str_(""))],
        [("plain", np.bytes_(b""))],
        [("plain", "\ud800\udc00")],
        [("odd", "uninitialized")],
        [("dict", "dict", (("\ud800\udc00", tensor("float32", (2,))),))],
        [("list", tuple(tensor("bool", (n,), view) for n in (9, states.LARGE) for view in ("plain", "strided")))],
        [tensor("float4_e2m1fn_x2", (7, 10_000), "transposed")],
        [tensor("bfloat16", (0,), "strided")],
        [tensor("float32", (1,), "strided"), tensor("bool", (1,), "strided")],
        [tensor("float32", (2, 3), "neg"), tensor("complex64", (2, 3), "conj")],
        [tensor("float64", (2, 3), wrap="own"), tensor("float64", (states.LARGE,), wrap="own")],
        [("dict", "dict", ((key, tensor("int8", (2,))),)) for key in (1, True, 1.0, np.int64(1))],
        [("dict", "dict", (((key, ""), ("plain", 1)),)) for key in (0.0, -0.0, 0)],
        [("list", (tensor("float32", (5,)), sub)) for sub in (tensor("float32", (5,), seed=4), ("tie", 0))],
        [("list", (tensor("complex64", (5,)), sub)) for sub in (("tie", 0), tensor("complex64", (5,), "conj"))],
    ],
    ids=lambda specs: ascii(specs)[:40],
)
def test_what_was_lost_once_comes_back_or_is_refused(specs: list[Spec]) -> None:
    check(*specs)
