"""What tensors that wrap others hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from mlflash.state.wrapped_tensors import found_in, inner_of


def leaves(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, dict):
        for item in value.values():
            yield from leaves(item)
    elif isinstance(value, torch.Tensor) and (part := found_in(value, "")) is not None:
        yield from leaves(inner_of(part[0]))
    elif isinstance(value, torch.Tensor):
        yield value.to_local() if isinstance(value, DTensor) else value
