"""Save padding in the state of Megatron's distributed optimizer as zeros, not as whatever the memory held.

The optimizer fills gaps between its shards with ``torch.empty`` in a checkpoint. Nothing reads these values, but they
are saved. Without zeros, two saves of one state would differ, and a check of values would report them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

_METHODS = ("sharded_param_state_dp_reshardable", "sharded_param_state_fs_bucket_space")
"""The method of Megatron Core from 0.15 on, and that of older versions."""


def fill_with_zeros() -> None:
    """Let the distributed optimizers of this process give zeros as padding from now on. Not collective.

    This changes nothing if it was called before, if Megatron's optimizer is not imported, or if that has no padding.
    """
    module = sys.modules.get("megatron.core.optimizer.distrib_optimizer")
    optimizer = getattr(module, "DistributedOptimizer", None)
    for name in _METHODS:
        tell = getattr(optimizer, name, None)
        if tell is not None and not hasattr(tell, "fills_with_zeros"):
            setattr(optimizer, name, _with_zeros(tell))


def _with_zeros(tell: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(tell)
    def told(*given: Any, **more: Any) -> Any:
        state = tell(*given, **more)
        for tensors in _padding(state):
            for one in tensors.values():
                if (data := getattr(one, "data", None)) is not None:
                    data.zero_()
        return state

    told.fills_with_zeros = True  # type: ignore[attr-defined]
    return told


def _padding(state: Any) -> Iterator[dict[str, Any]]:
    """Find the dicts in a nested state that are padding: ``{"param": ShardedTensor, ..., "padding": True}``."""
    if isinstance(state, dict) and "padding" in state:
        mark = state["padding"]
        if getattr(mark, "obj", mark) is True:
            yield state
    elif isinstance(state, dict | list):
        for one in state.values() if isinstance(state, dict) else state:
            yield from _padding(one)
