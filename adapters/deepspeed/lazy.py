"""Where a DeepSpeed engine changes weights and what its optimizer keeps: in one place, the step of `engine.optimizer`.

There it steps the optimizer that it was given, whose tensors are the shards (of ZeRO) in full precision, and from these
makes the weights. The shards of ZeRO-3 are put together elsewhere, before each layer, and are not written to.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from ..replacing import replaced

_KNOWN = {"DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3", "BF16_Optimizer", "FP16_Optimizer",
          "FP16_UnfusedOptimizer"}  # fmt: skip
"""Those that change nothing but in their step; not SuperOffload's and ZenFlow's, which step beside training."""


def optimizers_of(engine: Any) -> list[Any] | str:
    """The optimizer in whose step an engine changes weights; or why that is not known. Not collective."""
    optimizer = engine.optimizer
    if type(engine) is not DeepSpeedEngine:
        return f"a {type(engine).__name__} may change weights elsewhere than in its optimizer's step"
    if getattr(optimizer, "zenflow", False) or getattr(engine, "_deepcompile_active", False):
        return "ZenFlow and DeepCompile change or move the weights while training goes on"
    if isinstance(optimizer, torch.optim.Optimizer):
        return [optimizer]
    if type(optimizer).__name__ not in _KNOWN:
        return f"mlflash does not know where {type(optimizer).__name__} changes weights"
    return [optimizer.optimizer]


def owned_by(engine: Any) -> Iterable[Any]:
    """The weights, if they change in that step only: those of ZeRO-3 come and go. Not collective."""
    return () if engine.zero_optimization_partition_weights() else engine.module.parameters()


def steps_once_staged(engine: Any, wait_staged: Callable[[], None]) -> contextlib.ExitStack:
    """Let that step wait for what saves have left to be copied, until what it returns is closed. Not collective."""
    step = engine.optimizer.step

    @functools.wraps(step)
    def wait_and_step(*args: Any, **kwargs: Any) -> Any:
        wait_staged()
        return step(*args, **kwargs)

    return replaced(engine.optimizer, step=wait_and_step)
