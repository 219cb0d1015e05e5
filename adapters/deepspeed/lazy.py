"""Where a DeepSpeed engine changes weights and the optimizer's state: only in the step of `engine.optimizer`.

That step calls the step of the optimizer that the user gave, whose tensors are the shards (of ZeRO) in full precision,
and makes the weights from these. ZeRO-3 puts its shards together before each layer, which does not change them.
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
"""Optimizers that change tensors only in their step. Those of SuperOffload and ZenFlow step while training goes on."""


def optimizers_of(engine: Any) -> list[Any] | str:
    """Give the optimizer in whose step an engine changes weights, or say why that is not known. Not collective."""
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
    """Give the weights if they change only in that step. With ZeRO-3 give none, because they are freed and gathered.

    Not collective.
    """
    return () if engine.zero_optimization_partition_weights() else engine.module.parameters()


def steps_once_staged(engine: Any, wait_staged: Callable[[], None]) -> contextlib.ExitStack:
    """Let that step first wait until saves have copied everything. Close the result to undo it. Not collective."""
    step = engine.optimizer.step

    @functools.wraps(step)
    def wait_and_step(*args: Any, **kwargs: Any) -> Any:
        wait_staged()
        return step(*args, **kwargs)

    return replaced(engine.optimizer, step=wait_and_step)
