"""What two runs of the demo need to end with the same bits, and which tensors are compared."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def settle_buckets(ddp: Any, context: int) -> None:
    """Make DDP put its buckets into their final order. Collective over its ranks.

    DDP does this once, after its first backward. The rounding of gloo's sum over the ranks depends on the place of a
    gradient in a bucket. Without this call, the first step after a relaunch would not be bit-identical to the same step
    of an uninterrupted run.
    """
    nothing = torch.zeros((1, context), dtype=torch.long)
    ddp(nothing, nothing).backward()
    ddp.zero_grad()


def final_tensors(model: Any, optimizer: Any) -> dict[str, np.ndarray]:
    """Return all tensors that decide how training would continue, by name. Not collective."""
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        tensors |= {f"optimizer.{name}.{key}": tensor for key, tensor in optimizer.state[parameter].items()}
    tensors["rng.torch"] = torch.get_rng_state()
    return {name: tensor.numpy() for name, tensor in tensors.items()}
