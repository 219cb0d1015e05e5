"""Sampled replay: in some steps another rank computes a rank's micro-batch again, and the bits are compared.

    signatures       what is compared of a gradient: a digest, and sums from which the size of a difference follows
    gradients        read the gradients of one rank's pass before they are reduced, for DDP, FSDP2 and plain models
    undisturbed      restore buffers, generators and wrappers after a pass
    packed_inputs    convert a micro-batch and the state its computation began with to bytes
    ring             the ranks that compute each other's micro-batches
    verdicts         find the rank that is wrong, and say why
    replay           Replay: forward and backward of a step, and of some steps again

Example:
    check = replay.Replay(model, every=1000)
    for step, batch in enumerate(loader):
        loss = check.forward_backward(step, batch, lambda model, batch: model(batch).square().mean())
        optimizer.step()
"""

from .replay import Replay
from .verdicts import Mismatch, Place

__all__ = ["Mismatch", "Place", "Replay"]
