"""Read the gradients of one rank's pass through a model before they are reduced over ranks.

A hook on each leaf of the graph gets the gradient as this rank computed it. With DDP and plain models the leaves are
the parameters. With FSDP2 the leaves are whole parameters, which it gathers into the same objects each time. Torch has
no public names for these, so this module uses attributes of PyTorch 2.13 to 2.15.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..left_steps import groups_of

LOSS = "loss"
SUMS = 1024


@dataclasses.dataclass(frozen=True)
class Signature:
    """The signature of a tensor.

    Attributes:
        digest: XXH3-64 of its bytes.
        sums: sums over every 1024th element, float64, shape (at most 1024,).
        summands: largest number of elements in a sum.
        largest: largest magnitude of an element.
    """

    digest: bytes
    sums: np.ndarray
    summands: int
    largest: float


Signatures = dict[str, Signature]


def backward(model: nn.Module, names: dict[int, str], loss: torch.Tensor) -> tuple[Signatures, list[str]]:
    """Run the backward pass of a step and give the signatures of its loss and of all gradients.

    Collective over the groups over which wrappers of the model reduce gradients. ``grad`` gets the same values as
    without the signatures.

    Args:
        model: the model that computed the loss.
        names: names of its parameters (`names_of`).
        loss: of shape () or any shape with one element.

    Returns:
        The signatures; and the names of parameters whose gradients did not come through the graph of the loss, because
        a part of backward runs its own backward. `backward_aside` cannot see those gradients.
    """
    found = {LOSS: sign(loss)}
    leaves, reached = _leaves(model, names), _reached(loss)
    with _watched(leaves, found):
        loss.backward()
    return found, [name for name, leaf in leaves.items() if name in found and id(leaf) not in reached]


def backward_aside(model: nn.Module, names: dict[int, str], loss: torch.Tensor) -> Signatures:
    """Run a backward pass only for its signatures, and give these.

    Collective over the groups over which the model's parameters are gathered. It accumulates and reduces no gradient,
    and keeps none after reading it.
    """
    found = {LOSS: sign(loss)}
    leaves = _leaves(model, names)
    with _watched(leaves, found, drop=True):
        torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return found


def names_of(model: nn.Module) -> dict[int, str]:
    """Give the name of each parameter by the `id` of its object. Not collective."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _leaves(model: nn.Module, names: dict[int, str]) -> dict[str, torch.Tensor]:
    """Give the leaves of the graph that belong to parameters, by name. Call it after forward."""
    found: dict[str, torch.Tensor] = {}
    for module in model.modules():
        for group in groups_of(module) if isinstance(module, FSDPModule) else ():
            for param in group.fsdp_params:
                if hasattr(param, "_unsharded_param"):  # otherwise this rank has not used it
                    whole = param.unsharded_param
                    found[names.get(id(param.sharded_param)) or names.get(id(whole)) or str(param._param_fqn)] = whole
    for name, parameter in model.named_parameters():
        found.setdefault(name, parameter)
    return {name: leaf for name, leaf in found.items() if leaf.requires_grad}


def _reached(loss: torch.Tensor) -> set[int]:
    """Give the ids of the leaves in the graph of a loss."""
    left, seen, found = [loss.grad_fn], set(), set()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        left += [function for function, _ in node.next_functions]
    return found


@contextlib.contextmanager
def _watched(leaves: dict[str, torch.Tensor], found: Signatures, drop: bool = False) -> Iterator[None]:
    """Note the signature of each gradient that reaches a leaf. With ``drop``, also free its memory."""

    def watch(name: str, leaf: torch.Tensor) -> torch.utils.hooks.RemovableHandle:
        def note(gradient: torch.Tensor) -> torch.Tensor | None:
            # PyTorch 2.15 casts to the dtype in which FSDP2 reduces: in a pass aside before this hook, else after it.
            found[name] = sign(gradient.to(leaf.dtype))
            plain = drop and type(gradient) is torch.Tensor and not gradient.is_sparse
            return gradient.new_zeros(()).expand(gradient.shape) if plain else None

        return leaf.register_hook(note)

    handles = [watch(name, leaf) for name, leaf in leaves.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# What is compared of a gradient: a digest of its bytes, and sums from which the size of a difference follows. They
# replace the gradients, so that a replay keeps none: the digest has 8 bytes, and the sums have at most 8 KiB.


def sign(tensor: torch.Tensor) -> Signature:
    """Make the signature of a gradient. Not collective. It only reads the tensor and copies it to the host."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    values = local.detach()
    indices = b""
    if values.is_sparse:
        values = values.coalesce()
        indices, values = _bytes(values.indices()).tobytes(), values.values()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    flat = values.reshape(-1)
    digest = xxhash.xxh3_64(indices)
    digest.update(_bytes(flat))
    whole = flat.numel() // SUMS * SUMS
    sums = torch.zeros(min(flat.numel(), SUMS), dtype=torch.float64, device=flat.device)
    if whole:
        sums += flat[:whole].view(-1, SUMS).sum(0, dtype=torch.float64)
    sums[: flat.numel() - whole] += flat[whole:]
    largest = torch.linalg.vector_norm(flat, math.inf).item() if flat.numel() else 0.0
    return Signature(digest.digest(), sums.cpu().numpy(), max(1, -(-flat.numel() // SUMS)), largest)


def difference(one: Signature, other: Signature) -> float:
    """Give the difference of two tensors, relative to the largest element of either. 0.0 for the same bits.

    It is the largest difference of two sums, divided by the square root of their number of summands. This equals the
    difference of single elements if there are at most 1024 elements, or if elements differ by chance. A single wrong
    element among many appears smaller by that root. If only one of the two is infinite or NaN somewhere, the difference
    is infinite.
    """
    if one.digest == other.digest:
        return 0.0
    if one.sums.shape != other.sums.shape or one.summands != other.summands:
        return math.inf
    with np.errstate(invalid="ignore"):
        alike = (one.sums == other.sums) | (np.isnan(one.sums) & np.isnan(other.sums))
        apart = np.where(alike, 0.0, np.abs(one.sums - other.sums))
    most = float(np.max(np.where(np.isnan(apart), math.inf, apart), initial=0.0))
    scale = max(one.largest, other.largest) * math.sqrt(one.summands)
    if most == 0.0:
        return 0.0
    return most / scale if math.isfinite(most) and math.isfinite(scale) and scale > 0 else math.inf


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
