"""What a state holds, bit for bit, as texts that processes can write down and compare."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import keystr, tree_flatten_with_path


def digests(value: Any, name: str = "") -> dict[str, str]:
    """Of each leaf of a state or of results its class and this rank's bits, by path."""
    found = {}
    for path, leaf in tree_flatten_with_path(value)[0]:
        at = name + keystr(path)
        if callable(getattr(leaf, "state_dict", None)):
            state = leaf.state_dict()
            found.update(digests(state, at))
            if isinstance(leaf, torch.nn.Module):
                found[f"{at} versions"] = repr(dict(state._metadata))
        elif isinstance(leaf, (torch.Tensor, np.ndarray)):
            local = leaf.to_local() if isinstance(leaf, DTensor) else leaf
            where = f" {leaf.placements}" if isinstance(leaf, DTensor) else ""
            found[at] = f"{type(leaf).__name__} {leaf.dtype} {list(local.shape)}{where} {_bits(local)}"
        else:
            found[at] = f"{type(leaf).__name__} {leaf!r}"
    return found


def digest(value: Any) -> str:
    return hashlib.sha256(repr(sorted(digests(value).items())).encode()).hexdigest()


def _bits(leaf: torch.Tensor | np.ndarray) -> str:
    if isinstance(leaf, torch.Tensor):
        leaf = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(np.ascontiguousarray(leaf).tobytes()).hexdigest()[:16]
