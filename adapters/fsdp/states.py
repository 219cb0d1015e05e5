"""State dicts of a model and its optimizer: local, sharded and full.

local    what this rank has, as plain tensors in the memory of the live ones: no collective, and loading fills the
live model. Goes back to the same number of shards only, with any number of replicas.
sharded  DTensors or ShardedTensors by parameter name: can be loaded on any number of ranks.
full     whole tensors on rank 0, for export.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp._common_utils import clean_tensor_name
from torch.distributed.tensor import DTensor

from .ranker import with_other_shards

DEGREE = "sharded over "
"""Begins the key that says over how many ranks a local state dict is sharded, as in ``"sharded over 8"``."""


class LocalState(dict[str, Any]):
    """A local state dict.

    Attributes:
        others: the ranks that hold other shards of the same model: the names of their tensors are those of this one's.
    """

    others: frozenset[int] = frozenset()


def local_state_dict(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """What this rank has of a model (FSDP1, FSDP2, DDP or plain) and its optimizer.

    Not collective: no message is sent. The tensors are those of the model and the optimizer, so that a load fills them;
    the optimizer must have its state (see `init_optim_state`).

    Returns:
        ``model``, ``optimizer`` where one was given, and a key that says over how many ranks they are sharded.
    """
    tensors = {clean_tensor_name(name): _local(tensor) for name, tensor in _tensors(model)}
    state = LocalState({"model": tensors, f"{DEGREE}{_degree(model)}": True})
    state.others = frozenset(with_other_shards(model))
    if optimizer is not None:
        state["optimizer"] = _localised(optimizer.state_dict())
    return state


def load_local_state_dict(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, state_dict: Mapping[str, Any]
) -> None:
    """Take over what a load did not fill in place: the optimizer's values that are no tensors.

    Not collective.

    Args:
        model: that `local_state_dict` was given.
        optimizer: likewise; None: only the model is taken over.
        state_dict: what it returned, filled by `Checkpoints.load`.
    """
    live = {clean_tensor_name(name): _local(tensor) for name, tensor in _tensors(model)}
    for name, tensor in state_dict["model"].items():
        if tensor.data_ptr() != live[name].data_ptr():
            live[name].copy_(tensor)
    if optimizer is None:
        return
    loaded = state_dict["optimizer"]
    for group, saved in zip(optimizer.param_groups, loaded["param_groups"], strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})
    numbers = dict(enumerate(p for g in optimizer.param_groups for p in g["params"]))
    for number, values in loaded["state"].items():
        mine = optimizer.state[numbers[number]]
        for key, value in values.items():
            if not isinstance(value, torch.Tensor):
                mine[key] = value
            elif _local(mine[key]).data_ptr() != value.data_ptr():
                _local(mine[key]).copy_(value)


def sharded_state_dict(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """The sharded state of a model and its optimizer by parameter names, as `get_state_dict` of PyTorch gives it.

    Collective over the ranks of the model for FSDP1; for FSDP2 no message is sent.
    """
    model_state, optimizer_state = get_state_dict(model, [] if optimizer is None else optimizer)
    return {"model": model_state} | ({} if optimizer is None else {"optimizer": optimizer_state})


def load_sharded_state_dict(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, state_dict: Mapping[str, Any]
) -> None:
    """Put what `sharded_state_dict` gave, and a load filled, into model and optimizer.

    Collective over the ranks of the model for FSDP1; for FSDP2 no message is sent.
    """
    optimizers = [] if optimizer is None else optimizer
    set_state_dict(model, optimizers, model_state_dict=state_dict["model"],
                   optim_state_dict=state_dict.get("optimizer", {}))  # fmt: skip


def full_state_dict(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """The whole state, in the CPU memory of rank 0; others get empty dicts. Collective over the ranks of the model."""
    # On the CPU there is nothing to offload, and PyTorch 2.13 crashes (SIGSEGV) where FSDP1 tries.
    offload = any(param.device.type != "cpu" for param in model.parameters())
    options = StateDictOptions(full_state_dict=True, cpu_offload=offload)
    model_state, optimizer_state = get_state_dict(model, [] if optimizer is None else optimizer, options=options)
    if dist.is_initialized() and dist.get_rank() > 0:
        model_state, optimizer_state = {}, {}
    return {"model": model_state} | ({} if optimizer is None else {"optimizer": optimizer_state})


def init_optim_state(optimizer: torch.optim.Optimizer, skip_empty_param: bool = True) -> None:
    """Make the state of a new optimizer, so that a load can fill it: a step with zero gradients and learning rate.

    Not collective. An optimizer that has state, or gradients, is left alone. Call it between steps only.

    Args:
        optimizer: of any class.
        skip_empty_param: make none for parameters of which this rank has nothing.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if optimizer.state or any(param.grad is not None for param in params):
        return
    for param in params:
        if param.requires_grad and not (skip_empty_param and _local(param).numel() == 0):
            param.grad = torch.zeros_like(param)
    rates = [group.get("lr") for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        if "lr" in group:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if "lr" in group:
            group["lr"] = rate
    optimizer.zero_grad(set_to_none=True)


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All parameters and persistent buffers by name; of FSDP1 the flat parameters of its units."""
    flat: set[int] = set()
    for prefix, module in model.named_modules():
        if isinstance(module, FSDP1) and module._handle is not None:
            handle = module._handle
            yield f"{prefix}.{_FLAT}".lstrip("."), handle.flat_param.detach()
            flat |= {id(param) for param in (handle.flat_param, *(handle.flat_param._params or ()))}
    for name, param in model.named_parameters():
        if id(param) not in flat:
            yield name, param.detach()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}".lstrip("."), buffer.detach()


_FLAT = "_flat_param"


def _degree(model: torch.nn.Module) -> int:
    """Over how many ranks a model is sharded."""
    degrees = [1]
    for module in model.modules():
        if isinstance(module, FSDP1) and module.process_group is not None:
            degrees.append(dist.get_world_size(module.process_group))
    for param in model.parameters():
        if isinstance(param, DTensor):
            sizes = [param.device_mesh.size(d) for d, p in enumerate(param.placements) if not p.is_replicate()]
            degrees.append(torch.Size(sizes).numel())
    return max(degrees)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _localised(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _local(value)
    if isinstance(value, Mapping):
        return {key: _localised(sub) for key, sub in value.items()}
    if isinstance(value, list):
        return [_localised(sub) for sub in value]
    return value
