"""Megatron's weights at a save: which of them are whole, and where they change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

_KNOWN = (DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer)


def gather(chunks: Sequence[Any], optimizer: Any) -> None:
    """Gather what ``--overlap-param-gather`` leaves to the next forward pass, before which weights are of two steps.

    Megatron's own training loop does so before it saves. Collective over data-parallel ranks.

    Args:
        chunks: of the model, as Megatron has wrapped them.
        optimizer: Megatron's; None: there is none.
    """
    late = [chunk for chunk in chunks if _is_gathered_late(chunk)]
    if late and hasattr(optimizer, "prepare_model_params_for_param_sync"):
        optimizer.prepare_model_params_for_param_sync()
    for chunk in late:
        chunk.start_param_sync(force_sync=True)


def changed_in_steps(chunks: Sequence[Any], optimizer: Any) -> Iterable[Any]:
    """Give the weights, where nothing but a step of the optimizer changes them, after that of torch's inside of it.

    Not so where they are gathered in the forward pass, share memory with gradients (MXFP8), or come from an optimizer
    of a class that is not known, or of which this rank has no part: another one may gather them first. Not collective.
    """
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    if any(map(_is_gathered_late, chunks)) or not all(map(_is_known, parts)):
        return ()
    return [one for chunk in chunks for one in chunk.parameters() if type(one.data) is torch.Tensor]


def _is_gathered_late(chunk: Any) -> bool:
    return isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather


def _is_known(part: Any) -> bool:
    if type(part) not in _KNOWN or getattr(part, "is_stub_optimizer", False):
        return False
    return not getattr(part.config, "reuse_grad_buf_for_mxfp8_param_ag", False)
