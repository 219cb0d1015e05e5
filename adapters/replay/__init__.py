"""Sampled replay: in some steps another rank computes a rank's micro-batch again, and the bits are compared.

    gradients    sign the gradients of one rank's pass before they are reduced, for DDP, FSDP2 and plain models
    replay       Replay: forward and backward of a step, and of some steps again; find the rank that is wrong

Example:
    check = replay.Replay(model, every=1000)
    for step, batch in enumerate(loader):
        loss = check.forward_backward(step, batch, lambda model, batch: model(batch).square().mean())
        optimizer.step()
"""

from .replay import Mismatch, Place, Replay

__all__ = ["Mismatch", "Place", "Replay"]
