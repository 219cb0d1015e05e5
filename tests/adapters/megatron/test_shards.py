"""A real Megatron Core saves and loads sharded states through `dist_checkpointing`, in one layout and in others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import megatron_on_cpu
import pytest
import torch
from emulated import Nodes
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron_on_cpu import Training, digest, on_cpu, whole_and_first
from torch_jobs import job

from mlflash import Checkpointer
from mlflash.adapters.megatron import LoadShards, LocalCheckpoints, SaveShards, padding
from mlflash.errors import StepNotFound, Unrestorable

pytestmark = [
    pytest.mark.mpi(min_size=4),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),  # its own
]


def save(ckpt: Checkpointer, training: Training, then: int = 0) -> None:
    """Save the step of a training; until it is committed it trains on."""
    to = SaveShards(ckpt)
    request = dist_checkpointing.save(
        training.sharded_state(), to.directory(training.step), to, async_sharded_save=True
    )
    training.train(then)
    request.execute_sync()


def whole_tensors(ckpt: Checkpointer) -> dict[str, torch.Tensor]:
    """Every tensor of the newest checkpoint, whole, on each rank."""
    load = LoadShards(ckpt)
    directory = load.directory()
    wanted = load.load_tensors_metadata(directory)
    found = dist_checkpointing.load(wanted, directory, load, validate_access_integrity=False)
    return {name: value for name, value in found.items() if torch.is_tensor(value)}


def load_into(ckpt: Checkpointer, training: Training, **more: Any) -> Any:
    load = LoadShards(ckpt)
    state = training.sharded_state(True)
    if more.pop("other_layout", False):
        del state["rng_state"]  # as Megatron does
    return dist_checkpointing.load(state, load.directory(), load, **more)


@pytest.mark.parametrize(("tensor", "sharded"), [(1, False), (2, True)])
def test_training_goes_on_after_a_lost_node_as_if_nothing_had_happened(
    options: dict[str, Any], nodes: Nodes, tensor: int, sharded: bool
) -> None:
    with job(), on_cpu():
        expected, first = whole_and_first(tensor, sharded)
        with Checkpointer(**options) as ckpt:
            assert LoadShards(ckpt).directory() is None
            save(ckpt, first, then=5)
            with pytest.raises(StepNotFound):
                LoadShards(ckpt).directory(2)
    nodes.lose(1)
    with job(), on_cpu():
        again = Training(tensor, sharded)
        with Checkpointer(**options) as ckpt:
            state, missing, unexpected = load_into(ckpt, again, strict="return_all")
            assert not missing and not unexpected
            again.load(state)
            again.train(6)
            assert (again.losses, digest(again)) == expected


def test_where_all_copies_are_lost_the_recipe_goes_on_from_megatrons_own(options: dict[str, Any], nodes: Nodes) -> None:
    with job(), on_cpu():
        first = Training()
        first.train(1)
        with Checkpointer(**options) as ckpt:
            save(ckpt, first)
        nodes.damage(first.step)
        with Checkpointer(**options) as ckpt:
            with pytest.raises(Unrestorable):
                LoadShards(ckpt).directory()
            assert LoadShards(ckpt).directory(instead="/lustre/iter_0000001") is None


def test_a_save_may_begin_before_the_one_before_it_is_finalized(options: dict[str, Any]) -> None:
    with job(), on_cpu():
        training = Training()
        with Checkpointer(**options) as ckpt:
            to, requests = SaveShards(ckpt), []
            for step in (1, 2):
                training.train(step)
                directory = to.directory(step)
                state = training.sharded_state()
                requests.append(dist_checkpointing.save(state, directory, to, async_sharded_save=True))
            for request in requests:
                request.execute_sync()
            assert ckpt.steps() == [1, 2]


def test_other_layouts_have_the_same_bits(
    options: dict[str, Any], nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    any_layout = "fully_reshardable" if megatron_on_cpu.VERSION >= (0, 14) else "fully_sharded_model_space"
    monkeypatch.setattr(megatron_on_cpu, "CUT", any_layout)
    with job(), on_cpu():
        first = Training(tensor=2)
        first.train(3)
        with Checkpointer(**options) as ckpt:
            save(ckpt, first)
            saved = whole_tensors(ckpt)
    assert any(name.startswith("optimizer.") for name in saved)
    for number, tensor in enumerate((1, 4, 2)):
        nodes.lose(number % 2)
        with job(), on_cpu():
            other = Training(tensor)
            with Checkpointer(**options) as ckpt:
                other.load(load_into(ckpt, other, other_layout=True))
                assert other.step == 3 + number
                other.step += 1
                save(ckpt, other)
                found = whole_tensors(ckpt)
            assert found.keys() == saved.keys()
            assert all(torch.equal(found[name].view(torch.uint8), saved[name].view(torch.uint8)) for name in saved)


@pytest.mark.parametrize("saves", ["shards", "local"])
def test_padding_is_saved_as_zeros_whatever_the_memory_held(
    options: dict[str, Any], root: Path, monkeypatch: pytest.MonkeyPatch, saves: str
) -> None:
    """It was a false alarm of the check of values, and could be NaN."""
    for name in padding._METHODS:
        if (known := getattr(DistributedOptimizer, name, None)) is not None:
            monkeypatch.setattr(DistributedOptimizer, name, getattr(known, "__wrapped__", known))
    with job(), on_cpu():
        training = Training(tensor=2)
        training.train(1)
        with Checkpointer(**options) as ckpt:
            _ = SaveShards(ckpt) if saves == "shards" else LocalCheckpoints(root / "local")
            empty = torch.empty
            with monkeypatch.context() as patch:
                patch.setattr(torch, "empty", lambda *sizes, **more: empty(*sizes, **more).fill_(7))
                state = training.sharded_state()
    tensors = [one.data for one in nested_values(state["optimizer"]) if torch.is_tensor(getattr(one, "data", None))]
    assert tensors and not any(bool((one == 7).any()) for one in tensors)
