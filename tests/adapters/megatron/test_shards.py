"""A real Megatron Core saves and loads sharded states through `dist_checkpointing`, in one layout and in others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import megatron_on_cpu
import pytest
import torch
from emulated import COMM, Nodes
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron_on_cpu import PartsTraining, Training, digest, on_cpu, whole_and_first
from torch.distributed.checkpoint.api import CheckpointException
from torch_jobs import job

from mlflash import Checkpointer
from mlflash.adapters.megatron import LoadShards, LocalCheckpoints, SaveShards, padding, work_without_nvrx
from mlflash.errors import StateError, StepNotFound, Unrestorable


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
    monkeypatch.setattr(megatron_on_cpu, "CUT", "fully_reshardable")
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
    for name in padding._WITH_GAPS:
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


def came_back(ckpt: Checkpointer, again: PartsTraining, expected: dict[str, dict[str, torch.Tensor]]) -> None:
    """Load the newest checkpoint, and compare what the optimizer holds bit by bit with what was saved."""
    again.load(load_into(ckpt, again, other_layout=True))
    found = again.moments()
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].keys() == values.keys() == {"param", "exp_avg", "exp_avg_sq"}
        for key, value in values.items():
            assert torch.equal(found[name][key], value), (name, key)
            assert key == "param" or value.any()


def linears() -> list[torch.nn.Module]:
    """Layers of which two fill a bucket, whose length is then padded."""
    return [torch.nn.Linear(70, 130) for _ in range(6)]


def test_moments_in_several_buckets_come_back_from_a_fully_reshardable_checkpoint(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Core 0.19.2 itself saves zeros and other parameters' moments: Megatron-LM#5077. What stays wrong is refused."""
    monkeypatch.setattr(megatron_on_cpu, "CUT", "fully_reshardable")
    with job(2) as comm, on_cpu():
        if comm is not None:
            first = PartsTraining(linears(), bucket=12_000)
            first.train(3)
            (buffer,) = first.model.buffers
            assert len(buffer.buckets) == 3 and all(len(one.grad_data) > one.numel_unpadded for one in buffer.buckets)
            expected = first.moments()
            with Checkpointer(comm=comm, **options) as ckpt:
                save(ckpt, first)
                with monkeypatch.context() as patch, pytest.raises(StateError, match="Megatron-LM#5077"):
                    patch.setattr(padding, "_without_padding", lambda buffer, before: buffer.param_index_map)
                    save(ckpt, first)
    for ranks in (2, 1):
        with job(ranks) as comm, on_cpu():
            if comm is not None:
                again = PartsTraining(linears(), bucket=12_000)
                with Checkpointer(comm=comm, **options) as ckpt:
                    came_back(ckpt, again, expected)


def test_moments_of_very_uneven_parameters_come_back_on_all_and_on_fewer_ranks(options: dict[str, Any]) -> None:
    """Some ranks have a part of one parameter, others parts of many: radixark/Megatron-LM#66, AReaL#1468."""

    def parts() -> list[torch.nn.Module]:
        norms = [torch.nn.LayerNorm(8) for _ in range(40)]
        return [*norms[:20], torch.nn.Embedding(50_000, 8), *norms[20:]]

    with job() as comm, on_cpu():
        first = PartsTraining(parts())
        first.train(3)
        (optimizer,) = first.optimizer.chained_optimizers
        counts = COMM.allgather(len(optimizer.model_param_gbuf_map))
        assert min(counts) == 1 and max(counts) > 40, counts
        expected = first.moments()
        with Checkpointer(comm=comm, **options) as ckpt:
            save(ckpt, first)
    for ranks in (4, 2):
        with job(ranks) as comm, on_cpu():
            if comm is not None:
                with Checkpointer(comm=comm, **options) as ckpt:
                    came_back(ckpt, PartsTraining(parts()), expected)


def test_weights_of_the_optimizer_are_not_loaded_without_its_moments(options: dict[str, Any]) -> None:
    """Without is_loading=True, a new optimizer of Transformer Engine asks for no moments: AReaL#1468."""
    with job() as comm, on_cpu():
        first = PartsTraining(linears())
        first.train(1)
        with Checkpointer(comm=comm, **options) as ckpt:
            save(ckpt, first)
            again, load = PartsTraining(linears()), LoadShards(ckpt)
            state = again.sharded_state(True)
            ((bucket,),) = state["optimizer"]["param_state"][0].values()
            for tensors in bucket:
                del tensors["exp_avg"], tensors["exp_avg_sq"]
            with pytest.raises(CheckpointException, match="is_loading=True"):
                dist_checkpointing.load(state, load.directory(), load)
            came_back(ckpt, again, first.moments())


def aware(training: Training, algo: str) -> Any:
    from megatron.core.dist_checkpointing.tensor_aware_state_dict import MCoreTensorAwareStateDict

    work_without_nvrx()
    return MCoreTensorAwareStateDict.from_state_dict(training.sharded_state(), algo, training.replicas)[0]


@pytest.mark.parametrize("algo", ["atomic", "fully_parallel"])
@pytest.mark.parametrize(("tensor", "sharded"), [(1, False), (1, True), (2, True)])
def test_training_goes_on_from_local_checkpoints_after_a_lost_node(
    start: Any, nodes: Nodes, tensor: int, sharded: bool, algo: str
) -> None:
    with job(), on_cpu():
        expected, first = whole_and_first(tensor, sharded)
        with start() as manager:
            request = manager.save(aware(first, algo), 3, is_async=True)
            first.train(5)  # the checkpoint must not see this
            request.execute_sync()
    nodes.lose(1)
    with job(), on_cpu():
        again = Training(tensor, sharded)
        with start() as manager:
            assert manager.find_latest() == 3
            loaded, _ = manager.load()
            state = loaded.to_state_dict(again.sharded_state(True), algo, parallelization_group=again.replicas)
            again.load(state)
            again.train(6)
            assert (again.losses, digest(again)) == expected


def test_where_it_is_off_shards_are_neither_saved_nor_found(options: dict[str, Any], root: Path, enabled: bool) -> None:
    with job(), on_cpu(), Checkpointer(enabled=enabled, **options) as ckpt:
        training = Training()
        training.train(1)
        before = digest(training)
        save, load = SaveShards(ckpt), LoadShards(ckpt)
        for is_async in (False, True):
            request = dist_checkpointing.save(training.sharded_state(), save.directory(1), save,
                                              async_sharded_save=is_async)  # fmt: skip
            if is_async:
                request.execute_sync()
        assert load.directory() is None and digest(training) == before
    assert not list(root.glob("node*/*"))
