"""Megatron's weights at a save: make them whole, and find those that change only in the optimizer's step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

_KNOWN = (DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer)


def gather(chunks: Sequence[Any], optimizer: Any) -> None:
    """Gather the weights that ``--overlap-param-gather`` would gather in the next forward pass.

    Before that, some weights are of the step before. Megatron's own training loop does the same before it saves.
    Collective over data-parallel ranks.

    Args:
        chunks: the parts of the model, as Megatron wrapped them.
        optimizer: Megatron's optimizer. None: there is none.
    """
    late = [chunk for chunk in chunks if _is_gathered_late(chunk)]
    if late and hasattr(optimizer, "prepare_model_params_for_param_sync"):
        optimizer.prepare_model_params_for_param_sync()
    for chunk in late:
        chunk.start_param_sync(force_sync=True)


def changed_in_steps(chunks: Sequence[Any], optimizer: Any) -> Iterable[Any]:
    """Give the weights, if only a step of the optimizer changes them, after the step of the torch optimizer inside it.

    Not collective. Otherwise give none. That is the case if weights are gathered in the forward pass or share memory
    with gradients (MXFP8), if the optimizer's class is unknown, or if this rank has no part of the optimizer, because
    then another rank may gather them first.
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
