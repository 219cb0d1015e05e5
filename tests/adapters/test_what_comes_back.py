"""States of which something else came back, or nothing: each tensor comes back as it was, or is refused by name."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    StateDictType,
    fully_shard,
)
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch_jobs import COMM, job

from mlflash import Checkpointer, errors

RANK, SIZE = COMM.rank, COMM.size

pytestmark = pytest.mark.gate

State = dict[str, Any]


def stepped(state: State, steps: int = 1, seed: int = 0, first: int = 0) -> State:
    for step in range(first, first + steps):
        torch.manual_seed(100 * seed + step)
        state["model"](torch.randn(4, 4)).square().mean().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
    return state


def locals_of(state: State) -> list[torch.Tensor]:
    found = [*state["model"].parameters()]
    found += [value for its in state["optimizer"].state.values() for value in its.values() if torch.is_tensor(value)]
    return [value.detach().to_local() if hasattr(value, "to_local") else value for value in found]


def saved(make: Callable[[], State], options: dict[str, Any], **more: Any) -> list[torch.Tensor]:
    with job() as comm, Checkpointer(comm=comm, strict=True, **{**options, **more}) as ckpt:
        state = make()
        ckpt.save(1, state).wait()
        if "directory" in more:
            ckpt.drain().wait()
        return [value.clone() for value in locals_of(state)]


def restored(make: Callable[[], State], options: dict[str, Any], ranks: int = SIZE, **more: Any) -> State | None:
    with job(ranks) as comm:
        if comm is None:
            return None
        with Checkpointer(comm=comm, strict=True, **{**options, **more}) as ckpt:
            state = make()
            assert ckpt.restore(state) == 1
            return state


# The same names on several meshes


def experts(value: float | None = None, inner: str = "expert") -> State:
    """Two experts of one name, each sharded over half of the ranks; on few ranks each is whole on one."""
    half = dist.get_world_size() // 2
    shape, names = ((half, 2), ("dp", "expert")) if inner == "expert" else ((2, half), ("expert", "dp"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    expert = mesh.get_local_rank("expert")
    model = torch.nn.Linear(4, 4, bias=False)
    fully_shard(model, mesh=mesh["dp"])
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    if value is not None:
        stepped(state)
        for tensor in locals_of(state):
            if tensor.dim():  # steps belong to no mesh
                tensor.fill_(value + expert)
    model.expert = expert
    return state


@pytest.mark.parametrize("drain_format", ["hdf5", "dcp"])
@pytest.mark.parametrize("where", ["memory", "directory"])
@pytest.mark.parametrize(("ranks", "inner"), [(SIZE, "expert"), (2, "expert"), (2, "dp")])
def test_one_name_on_two_meshes_is_two_tensors(
    root: Path, options: dict[str, Any], tmp_path: Path, ranks: int, inner: str, where: str, drain_format: str
) -> None:
    more = {"directory": str(tmp_path / "ck"), "format": drain_format}
    saved(lambda: experts(5.0, inner), options, **more)
    if where == "directory":
        COMM.Barrier()
        if RANK == 0:
            for path in root.glob("node*/mlflash-*"):
                shutil.rmtree(path)
        COMM.Barrier()
    state = restored(lambda: experts(None, inner), options, ranks, **more)
    if state is not None:
        assert {value.item() for tensor in locals_of(state) for value in tensor.unique()} <= {
            5.0 + state["model"].expert,
            1.0,
        }


def test_a_name_that_several_meshes_have_is_refused_elsewhere(options: dict[str, Any]) -> None:
    saved(lambda: experts(5.0), options)
    with job(2) as comm:
        if comm is not None:
            model = torch.nn.Linear(4, 4, bias=False)
            fully_shard(model)
            state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
            with Checkpointer(comm=comm, **options) as ckpt:
                with pytest.raises(errors.StructureMismatch, match=r"each on a mesh of its own") as caught:
                    ckpt.restore(state)
                assert caught.value.tensor == "model.weight"


# Tensors that are not where each rank is


def partly(value: float) -> State:
    """A DTensor that ranks 1 and more have nothing of, and one with empty shards in two directions."""
    mesh = init_device_mesh("cpu", (SIZE // 2, 2), mesh_dim_names=("dp", "tp"))
    model = torch.nn.Linear(4, 1)
    parallelize_module(model, mesh["tp"], ColwiseParallel())
    fully_shard(model, mesh=mesh["dp"])
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    encoder = distribute_tensor(torch.full((6, 4), value), DeviceMesh("cpu", [0]), [Shard(0)])
    state = {"model": model, "optimizer": optimizer, "encoder": encoder}
    for tensor in [*locals_of(state), encoder.detach().to_local()]:
        tensor.fill_(value)
    return state


def test_ranks_without_a_part_of_a_tensor_save_and_restore_it(options: dict[str, Any]) -> None:
    saved(lambda: partly(3.0), options)
    state = restored(lambda: partly(0.0), options)
    assert state is not None
    assert all((tensor == 3).all() for tensor in [*locals_of(state), state["encoder"].to_local()])
    assert state["encoder"].to_local().numel() == (24 if RANK == 0 else 0)


def test_a_state_dict_that_is_full_on_rank_0_only_is_refused(options: dict[str, Any]) -> None:
    with job() as comm, Checkpointer(comm=comm, **options) as ckpt:
        model = FullyShardedDataParallel(torch.nn.Linear(8, 4), device_id=torch.device("cpu"))
        config = FullStateDictConfig(rank0_only=True)
        FullyShardedDataParallel.set_state_dict_type(model, StateDictType.FULL_STATE_DICT, config)
        with pytest.raises(errors.StateError, match="rank0_only=False") as caught:
            ckpt.save(1, {"model": model})
        assert caught.value.tensor == "model"


def flat(ranks: int) -> State:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    whole = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    return {"model": whole, "optimizer": torch.optim.AdamW(whole.parameters())}


def test_flat_shards_of_fsdp1_are_refused_on_one_rank(options: dict[str, Any]) -> None:
    saved(lambda: stepped(flat(SIZE)), options)
    with job(1) as comm:
        if comm is not None:
            refused = pytest.raises(errors.StructureMismatch, match="as FSDP1 does")
            with Checkpointer(comm=comm, **options) as ckpt, refused:
                ckpt.restore(flat(1))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("how", ["whole after forward", "whole after backward", "mixed precision"])
def test_weights_that_are_whole_are_those_of_the_restore_at_once(options: dict[str, Any], how: str) -> None:
    """NVIDIA-NeMo/Megatron-Bridge#3397, ISEEKYAN/Megatron-LM#104: what computes had the old weights until a step."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if how == "mixed precision" else MixedPrecisionPolicy()
    x = torch.linspace(-1, 1, 32).reshape(4, 8)

    def make(seed: int) -> State:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
        for layer in (*model, model):
            fully_shard(layer, reshard_after_forward=False, mp_policy=policy)
        if how == "whole after backward":
            model.set_reshard_after_backward(False)
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}

    def step(state: State) -> torch.Tensor:
        loss = state["model"](x).square().mean()
        loss.backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        return loss.detach()

    with job() as comm, Checkpointer(comm=comm, strict=True, **options) as ckpt:
        state, other = make(1), make(2)
        step(state)
        ckpt.save(1, state).wait()
        expected = [step(state), step(state)]
        step(other)
        for live in (state, other):
            if how == "whole after backward":
                step(live)
            else:
                with torch.no_grad():
                    live["model"](x)
            assert ckpt.restore(live, step=1) == 1
            assert [step(live), step(live)] == expected


# What optimizers keep


class Keeper(torch.optim.Optimizer):
    """Keeps something for each parameter, made by a function of it and its gradient when it is used first."""

    def __init__(self, params: Any, make: Callable[[Any], Any], late: int = 0):
        super().__init__(params, {"lr": 0.1})
        self._make, self._late = make, late

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["count"] = state.get("count", 0) + 1
            if state["count"] > self._late:
                kept = state.setdefault("kept", self._make(parameter))
                kept += 1
            parameter.to_local().sub_(parameter.grad.to_local(), alpha=0.1)


def local(parameter: Any) -> torch.Tensor:
    return torch.zeros_like(parameter.to_local())


def factor(parameter: Any) -> torch.Tensor:
    return torch.eye(len(parameter))


def average(parameter: Any) -> torch.Tensor:
    return parameter.detach().clone()


def kept_for(make: Callable[[Any], Any], late: int = 0) -> State:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 8, bias=False))
    fully_shard(model)
    return {"model": model, "optimizer": Keeper(model.parameters(), make, late)}


@pytest.mark.parametrize("make", [local, factor, average])
@pytest.mark.parametrize("before", [0, 1])
def test_what_an_optimizer_keeps_comes_back_as_what_it_was(
    options: dict[str, Any], make: Callable[[Any], Any], before: int
) -> None:
    with job():
        whole = stepped(kept_for(make), 4)
        expected = [type(its["kept"]) for its in whole["optimizer"].state.values()], locals_of(whole)
    saved(lambda: stepped(kept_for(make), 2), options)
    with job() as comm, Checkpointer(comm=comm, strict=True, **options) as ckpt:
        state = stepped(kept_for(make), before, seed=9)
        assert ckpt.restore(state) == 1
        stepped(state, 2, first=2)
        found = [type(its["kept"]) for its in state["optimizer"].state.values()], locals_of(state)
    assert found[0] == expected[0]
    assert all(torch.equal(one, other) for one, other in zip(found[1], expected[1], strict=True))


class Average:
    """Keeps averages of parameters, of which it has none before it begins."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.kept

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = state


def test_averages_that_begin_late_come_back_as_dtensors(options: dict[str, Any]) -> None:
    def make(begun: bool) -> State:
        state = kept_for(local) | {"average": Average()}
        if begun:
            state["average"].kept = {name: p.detach().clone() for name, p in state["model"].named_parameters()}
        return state

    saved(functools.partial(make, True), options)
    state = restored(functools.partial(make, False), options)
    assert state is not None
    for name, parameter in state["model"].named_parameters():
        kept = state["average"].kept[name]
        assert type(kept) is type(parameter.detach()) and kept.placements == parameter.placements
        assert torch.equal(kept.to_local(), parameter.to_local())
