"""Sampled replay: now and then another rank computes a rank's micro-batch again, and the bits are compared.

    signatures       what is compared of a gradient: a digest, and sums that say how large a difference is
    gradients        the gradients of one rank's pass, before they are reduced: of DDP, FSDP2 and plain models
    undisturbed      buffers, generators and wrappers are after a pass what they were before it
    packed_inputs    a micro-batch and what its computation began with, as bytes
    ring             the ranks that compute each other's micro-batches
    verdicts         which rank is wrong, in words
    replay           Replay: forward and backward of a step, and of some steps once more

Example:
    check = replay.Replay(model, every=1000)
    for step, batch in enumerate(loader):
        loss = check.forward_backward(step, batch, lambda model, batch: model(batch).square().mean())
        optimizer.step()
"""

from .replay import Replay
from .verdicts import Mismatch, Place

__all__ = ["Mismatch", "Place", "Replay"]
