"""Tensors that name their own parts for a checkpoint, by one of PyTorch's protocols.

`_Checkpointable` is a class with methods. `CheckpointableTensor`, since PyTorch 2.14, is a tensor with attributes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.planner_helpers import _create_write_items
from torch.distributed.checkpoint.utils import find_tensor_shard

from mlflash.state.leaves import is_placed

_KNOWS_PLACED = hasattr(dcp, "CheckpointableTensor")  # before, its planners take such a tensor for a whole one


def is_checkpointable(value: Any) -> bool:
    """Whether a value follows a protocol that DCP's planners know."""
    if hasattr(value, "__create_write_items__") and hasattr(value, "__get_tensor_shard__"):
        return True
    return _KNOWS_PLACED and isinstance(value, torch.Tensor) and is_placed(value)


def items_of(value: Any, name: str) -> list[WriteItem]:
    """Give the write items of a value that follows a protocol."""
    items: list[WriteItem] = _create_write_items(name, value)
    return items


def parts_of(value: Any, name: str) -> Iterator[tuple[WriteItem, torch.Tensor]]:
    """Give the write items of a value that follows a protocol, each with its tensor."""
    for item in items_of(value, name):
        yield item, find_tensor_shard(value, item.index).detach()


class Parts(torch.Tensor):
    """Replaces a tensor by other tensors as its parts. A planner finds the same items in it.

    Args:
        items: the write items of the tensor.
        tensors: one tensor for each item.
    """

    @staticmethod
    def __new__(cls, items: Sequence[WriteItem], tensors: Sequence[torch.Tensor]) -> Parts:
        data = items[0].tensor_data
        assert data is not None
        made: Parts = torch.Tensor._make_wrapper_subclass(cls, data.size, dtype=data.properties.dtype)
        return made

    def __init__(self, items: Sequence[WriteItem], tensors: Sequence[torch.Tensor]):
        self._items, self._tensors = list(items), list(tensors)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError("it has parts only")

    def __repr__(self) -> str:
        return f"Parts({self._items})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Parts, (self._items, self._tensors)

    def __create_write_items__(self, fqn: str, value: Any) -> list[WriteItem]:
        return self._items

    def __create_chunk_list__(self) -> list[Any]:
        return [item.tensor_data.chunk for item in self._items if item.tensor_data is not None]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return next(t for i, t in zip(self._items, self._tensors, strict=True) if i.index.offset == index.offset)
