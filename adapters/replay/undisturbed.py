"""Undo what a pass changes other than gradients: buffers, generators, and what DDP and FSDP2 remember."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

import mlflash

from ..left_steps import groups_of

_OF_GROUPS = ("reduce_grads", "all_reduce_grads")


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Give all buffers of a model by name, including those that are in no state dict. Not collective."""
    return dict(model.named_buffers(remove_duplicate=False))


def generators() -> dict[str, Any]:
    """Read the states of the global generators; for CUDA only that of this rank's device. Not collective."""
    state = mlflash.rng().state_dict()
    if "cuda" in state:
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_generators(state: Mapping[str, Any]) -> None:
    """Set generator states that `generators` has read on this or another rank. Not collective."""
    mlflash.rng().load_state_dict({name: value for name, value in state.items() if name != "cuda"})
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def fill_buffers(model: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Copy values into the buffers of these names. Use it within `undisturbed`. Not collective."""
    with torch.no_grad():
        for name, buffer in buffers_of(model).items():
            if (value := values.get(name)) is None:
                continue
            if value.shape == buffer.shape:
                buffer.copy_(value)
            else:
                _put(model, name, value)


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """At the end of the block, put back generators, buffers, and what DDP and FSDP2 remember of forward passes.

    Not collective. Within the block no wrapper reduces gradients. Buffers stay the same tensors.
    """
    state, buffers = mlflash.rng().state_dict(), buffers_of(model)
    copies = {name: buffer.detach().clone() for name, buffer in buffers.items()}
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, DistributedDataParallel):
                stack.enter_context(module.no_sync())
            elif isinstance(module, FSDPModule):
                for group in groups_of(module):
                    stack.enter_context(_attributes(group, dict.fromkeys(_OF_GROUPS, False)))
        try:
            yield
        finally:
            mlflash.rng().load_state_dict(state)
            now = buffers_of(model)
            with torch.no_grad():
                for name, buffer in buffers.items():
                    if now.get(name) is not buffer:
                        _put(model, name, buffer)
                    buffer.copy_(copies[name])


class Synced:
    """Remembers before a step whether the DDPs of a model send the buffers of their first rank to all ranks.

    A pass after the step can then do what the step did, and leave the setting unchanged. By itself, DDP would not send
    buffers in the first pass after one that reduces nothing.

    Not collective.
    """

    def __init__(self, model: nn.Module):
        self._found = [
            (one, bool(one.require_forward_param_sync), bool(one.will_sync_module_buffers()))
            for one in model.modules() if isinstance(one, DistributedDataParallel)
        ]  # fmt: skip

    def __bool__(self) -> bool:
        return any(syncs for *_, syncs in self._found)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Let the DDPs do the same in this pass."""
        with contextlib.ExitStack() as stack:
            for module, flag, _ in self._found:
                stack.enter_context(_attributes(module, {"require_forward_param_sync": flag}))
            yield


@contextlib.contextmanager
def _attributes(thing: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Set attributes for the duration of the block."""
    before = {name: getattr(thing, name) for name in values}
    try:
        for name, value in values.items():
            setattr(thing, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(thing, name, value)


def _put(model: nn.Module, name: str, buffer: torch.Tensor) -> None:
    module, _, key = name.rpartition(".")
    setattr(model.get_submodule(module), key, buffer)
