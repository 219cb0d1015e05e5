"""What `save` takes comes back equal; what would not is refused with its path, before the step counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from states import Wrapper
from unit.stored import Store

from mlflash.errors import StateError
from mlflash.state import layout, manifest
from mlflash.state.flatten import Flattener, flatten

LARGE = 70_000


@pytest.fixture
def store(node_memory: Any) -> Store:
    return Store(node_memory)


def refused(state: Any) -> StateError:
    with pytest.raises(StateError) as caught:
        flatten(state)
    return caught.value


def test_a_manifest_that_would_be_read_as_another_one_is_refused() -> None:
    placed = layout.plan(flatten({1: np.zeros(3), "p": 0.0}), 100)
    flat = flatten({1: np.zeros(3), "p": 0.0})
    written = manifest.Manifest(placed.entries, flat.structure.tree, flat.plain)
    entries, tree = manifest.encode_entries(placed.entries), manifest.encode_tree(written.tree)
    nbytes = placed.extents.payload_nbytes
    manifest.read_back(manifest.join(entries, tree, flat.plain), written, nbytes)
    wrong = [
        (entries, tree.replace(b"[[1,", b"[[true,"), flat.plain),
        (entries, tree.replace(b"[[1,", b"[[1.0,"), flat.plain),
        (entries, tree, [-0.0]),
        (entries, tree, [False]),
        (entries.replace(b"<f8", b"<i8"), tree, flat.plain),
        (entries.replace(b"<f8", b"|O8"), tree, flat.plain),
    ]
    for parts in wrong:
        with pytest.raises(StateError, match="restore would"):
            manifest.read_back(manifest.join(*parts), written, nbytes)


@pytest.mark.parametrize("size", [8, LARGE])
@pytest.mark.parametrize("make", [torch.ones, np.ones])
def test_a_copy_that_is_not_the_leaf_fails_the_first_save_of_its_structure(store: Store, make: Any, size: int) -> None:
    state = {"a": make(size), "other": make(size + 1)}
    store.write(state)
    flat = store.flattener.flatten(state)
    (copy_plan,) = store.stage._copy_plans.values()
    copy_plan.read_back(flat)
    store.slot.payload(store.extents)[5] ^= 1
    with pytest.raises(StateError, match="other bytes") as caught:
        copy_plan.read_back(flat)
    assert caught.value.tensor == "a"
    copy_plan.sort_leaves(flat, frozenset((0, 1)))
    copy_plan.read_back(flat)  # copied later: SampledBytes compare


# Classes


@pytest.mark.parametrize("freed", [torch.ones(30)[4:], torch.ones(LARGE)])
def test_a_tensor_whose_storage_is_freed_is_refused_and_not_read(freed: torch.Tensor) -> None:
    flattener = Flattener()
    flattener.flatten({"w": freed})
    freed.untyped_storage().resize_(0)
    for _ in range(2):
        with pytest.raises(StateError, match="no memory") as caught:
            flattener.flatten({"w": freed})
        assert caught.value.tensor == "w"


def test_a_dict_that_says_how_it_is_saved_is_saved_so(store: Store) -> None:
    class Own(dict):
        def state_dict(self) -> Any:
            return {"kept": self["kept"]}

        def load_state_dict(self, state: Any) -> None:
            self.update(state)

    store.write({"own": Own(kept=1, cache=object())})
    live = {"own": Own(kept=2, cache=3)}
    store.fill(live)
    assert live == {"own": {"kept": 1, "cache": 3}}


@pytest.fixture
def group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_a_shard_that_a_collective_still_brings_is_waited_for(group: None, store: Store) -> None:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    mesh = init_device_mesh("cpu", (1,))
    tensors = [torch.full((5,), float(n)) for n in range(2)]
    coming = [DTensor.from_local(AsyncCollectiveTensor(t), mesh, [Replicate()], run_check=False) for t in tensors]
    store.write({"a": coming[0], "b": coming[1]})
    assert store.load()["b"].tolist() == [1.0] * 5
    store.write({"a": coming[0], "b": coming[1]})
    assert store.load()["b"].tolist() == [1.0] * 5
    wrapped = DTensor.from_local(Wrapper(tensors[0].bfloat16(), tensors[1].bfloat16()), mesh, [Replicate()],
                                 run_check=False)  # fmt: skip
    assert refused({"w": wrapped}).tensor == "w"


# Storages


@pytest.mark.parametrize("size", [8, LARGE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_a_storage_can_be_resized_after_a_save_and_a_restore(store: Store, size: int, dtype: torch.dtype) -> None:
    tensor = torch.ones(size, dtype=dtype)
    other = torch.nn.Parameter(tensor.clone(), requires_grad=False)
    for _ in range(2):
        store.write({"t": tensor, "p": other})
    store.fill({"t": tensor, "p": other})
    for tensor_to_resize in (tensor, other):
        tensor_to_resize.untyped_storage().resize_(tensor_to_resize.nbytes * 2)
        tensor_to_resize.untyped_storage().resize_(0)


def test_a_storage_that_is_copied_later_cannot_be_resized_meanwhile(store: Store) -> None:
    tensor = torch.ones(LARGE)
    flat = flatten({"t": tensor})
    store.write({"t": tensor})
    later = store.stage.copy(flat, store.stage.plan(flat), store.slot, lazy={0: tensor})[1]
    with pytest.raises(RuntimeError, match="not resizable"):
        tensor.untyped_storage().resize_(0)
    later.finish()
    assert later.error is None
