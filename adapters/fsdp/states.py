"""State dicts of a model and its optimizer: local, sharded and full.

local    What this rank has, as plain tensors that share the memory of the live ones. Making it sends no message, and a
load fills the live model. It can be loaded only on the same number of shards, with any number of replicas.
sharded  DTensors or ShardedTensors by parameter name. It can be loaded on any number of ranks.
full     Whole tensors on rank 0, for export.
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

from .groups import with_other_shards

DEGREE = "sharded over "
"""Begins the key that says over how many ranks a local state dict is sharded, as in ``"sharded over 8"``."""


class LocalState(dict[str, Any]):
    """A local state dict.

    Attributes:
        others: the ranks that hold other shards of the same model, under the same names.
    """

    others: frozenset[int] = frozenset()


def local_state_dict(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Give what this rank has of a model (FSDP1, FSDP2, DDP or plain) and its optimizer.

    Not collective: it sends no message. The tensors share the memory of the model and the optimizer, so a load fills
    these. The optimizer must have its state (see `init_optim_state`).

    Returns:
        A dict with ``model``, with ``optimizer`` if you gave one, and with a key that says over how many ranks they are
        sharded.
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
    """Put into model and optimizer what a load did not fill in place: values of the optimizer that are not tensors.

    Not collective.

    Args:
        model: the model that you gave to `local_state_dict`.
        optimizer: the optimizer that you gave to it. None: the model only.
        state_dict: the dict that `local_state_dict` returned and `Checkpoints.load` filled.
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
        own = optimizer.state[numbers[number]]
        for key, value in values.items():
            if not isinstance(value, torch.Tensor):
                own[key] = value
            elif _local(own[key]).data_ptr() != value.data_ptr():
                _local(own[key]).copy_(value)


def sharded_state_dict(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Give the sharded state of a model and its optimizer by parameter names, as PyTorch's `get_state_dict` does.

    With FSDP1 collective over the ranks of the model. With FSDP2 it sends no message.
    """
    model_state, optimizer_state = get_state_dict(model, [] if optimizer is None else optimizer)
    return {"model": model_state} | ({} if optimizer is None else {"optimizer": optimizer_state})


def load_sharded_state_dict(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, state_dict: Mapping[str, Any]
) -> None:
    """Put a state dict of `sharded_state_dict`, after a load filled it, into model and optimizer.

    With FSDP1 collective over the ranks of the model. With FSDP2 it sends no message.
    """
    optimizers = [] if optimizer is None else optimizer
    set_state_dict(model, optimizers, model_state_dict=state_dict["model"],
                   optim_state_dict=state_dict.get("optimizer", {}))  # fmt: skip


def full_state_dict(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Give the whole state in the CPU memory of rank 0.

    Collective over the ranks of the model. Other ranks get empty dicts.
    """
    # On the CPU there is nothing to offload, and PyTorch 2.13 crashes (SIGSEGV) if FSDP1 tries.
    offload = any(param.device.type != "cpu" for param in model.parameters())
    options = StateDictOptions(full_state_dict=True, cpu_offload=offload)
    model_state, optimizer_state = get_state_dict(model, [] if optimizer is None else optimizer, options=options)
    if dist.is_initialized() and dist.get_rank() > 0:
        model_state, optimizer_state = {}, {}
    return {"model": model_state} | ({} if optimizer is None else {"optimizer": optimizer_state})


def init_optim_state(optimizer: torch.optim.Optimizer, skip_empty_param: bool = True) -> None:
    """Make the state of a new optimizer, so that a load can fill it.

    It makes one step with zero gradients and a learning rate of zero. Not collective. It does nothing if the optimizer
    has state, or if a parameter has a gradient. Call it between steps only.

    Args:
        optimizer: an optimizer of any class.
        skip_empty_param: make no state for a parameter if this rank has no element of it.
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
    """Give all parameters and persistent buffers by name. For units of FSDP1, give their flat parameters."""
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
