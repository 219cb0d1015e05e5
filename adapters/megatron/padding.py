"""Keep padding out of the state that Megatron's distributed optimizer saves.

- The optimizer fills gaps between its shards with ``torch.empty`` in a checkpoint. Nothing reads these values, but they
  are saved. Without zeros, two saves of one state would differ, and a check of values would report them.
- Each bucket of gradients is padded to a multiple of the number of ranks. With ``fully_reshardable``, Core 0.19 and
  older leave this padding out, but look for the parameters of later buckets as if it were there. They save values of
  other parameters, and zeros.

Source: https://github.com/NVIDIA/Megatron-LM/pull/5077
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from mlflash.errors import StateError

from ..replacing import replaced

log = logging.getLogger("mlflash")

_WITH_GAPS = ("sharded_param_state_dp_reshardable", "sharded_param_state_fs_bucket_space")
"""The method of Megatron Core from 0.15 on, and that of older versions."""
_IN_BUCKETS = "sharded_param_state_fully_reshardable"


def leave_out() -> None:
    """Let the distributed optimizers of this process save zeros as padding, and nothing else in its place, from now on.

    Not collective. This changes nothing if it was called before, if Megatron's optimizer is not imported, or if that
    has no padding.
    """
    module = sys.modules.get("megatron.core.optimizer.distrib_optimizer")
    optimizer = getattr(module, "DistributedOptimizer", None)
    for names, with_padding in ((_WITH_GAPS, _with_zeros), ((_IN_BUCKETS,), _at_right_places)):
        for name in names:
            before = getattr(optimizer, name, None)
            if before is not None and not hasattr(before, "leaves_out_padding"):
                method = with_padding(before)
                method.leaves_out_padding = True  # type: ignore[attr-defined]
                setattr(optimizer, name, method)


def _with_zeros(tell: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(tell)
    def method(*given: Any, **more: Any) -> Any:
        state = tell(*given, **more)
        for tensors in _padding(state):
            for tensor in tensors.values():
                if (data := getattr(tensor, "data", None)) is not None:
                    data.zero_()
        return state

    return method


def _padding(state: Any) -> Iterator[dict[str, Any]]:
    """Find the dicts in a nested state that are padding: ``{"param": ShardedTensor, ..., "padding": True}``."""
    if isinstance(state, dict) and "padding" in state:
        mark = state["padding"]
        if getattr(mark, "obj", mark) is True:
            yield state
    elif isinstance(state, dict | list):
        for part in state.values() if isinstance(state, dict) else state:
            yield from _padding(part)


def _at_right_places(tell: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(tell)
    has_fault = "pad" in inspect.unwrap(tell).__code__.co_names  # it fills up with zeros what it does not find

    @functools.wraps(tell)
    def method(own: Any, *given: Any, **more: Any) -> Any:
        before = [_padding_before(buffer) for buffer in own.buffers]
        if not any(map(any, before)):
            return tell(own, *given, **more)
        with contextlib.ExitStack() as places:
            if has_fault:
                for buffer, padding in zip(own.buffers, before, strict=True):
                    places.enter_context(replaced(buffer, param_index_map=_without_padding(buffer, padding)))
            state = tell(own, *given, **more)
        if not signature.bind(own, *given, **more).arguments.get("is_loading"):
            if has_fault and dist.get_rank() == 0:
                _say_what_is_wrong()
            if state is not None:  # on each rank, or on the first of the data-parallel ones
                _check(own, state)
        return state

    return method


def _padding_before(buffer: Any) -> list[int]:
    """Give how many numbers of padding come before each bucket of a buffer."""
    padded = [bucket.grad_data.numel() - bucket.numel_unpadded for bucket in buffer.buckets]
    return list(itertools.accumulate(padded[:-1], initial=0))


def _without_padding(buffer: Any, before: list[int]) -> dict[Any, tuple[int, int, int]]:
    """Give where each parameter begins and ends in a buffer, and its bucket, as if no bucket were padded.

    Example:
        Buckets of 100 and 90 numbers, each padded to 128: a parameter at 128 to 168, in bucket 1, is at 100 to 140.
    """
    return {
        parameter: (start - before[bucket], end - before[bucket], bucket)
        for parameter, (start, end, bucket) in buffer.param_index_map.items()
    }


def _check(optimizer: Any, state: dict[int, Any]) -> None:
    """Compare this rank's part of each parameter with what is to be saved of it, bit by bit."""
    parameters = itertools.chain.from_iterable(buffer.param_index_map for buffer in optimizer.buffers)
    for number, parameter in enumerate(parameters):
        if parameter not in optimizer.model_param_gbuf_map:
            continue
        span = optimizer._get_model_param_range_map(parameter)["param"]
        for name, value in optimizer._get_main_param_and_optimizer_states(parameter).items():
            if name not in state[number]:
                continue
            saved = state[number][name].data.flatten()[span.start : span.end]
            if not torch.equal(saved.view(torch.uint8), value.detach().to(saved).view(torch.uint8)):
                raise StateError(
                    "this version of Megatron makes a wrong state of an optimizer with several buckets of gradients "
                    "(Megatron-LM#5077), and mlflash cannot correct it: save without fully_reshardable, or install "
                    "another version of Megatron Core", tensor=state[number][name].key,
                )  # fmt: skip


@functools.cache
def _say_what_is_wrong() -> None:
    log.warning(
        "this version of Megatron saves a wrong optimizer state with --dist-ckpt-optim-fully-reshardable if there is "
        "more than one bucket of gradients (Megatron-LM#5077). mlflash corrects this in this process. Do not load the "
        "optimizer from such checkpoints that were saved without mlflash: they contain zeros and values of other "
        "parameters"
    )
