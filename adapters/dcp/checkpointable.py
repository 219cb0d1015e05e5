"""Tensors that name their own parts for a checkpoint: PyTorch's protocol `_Checkpointable`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem


def is_checkpointable(value: Any) -> bool:
    """Whether a value follows the protocol."""
    return hasattr(value, "__create_write_items__") and hasattr(value, "__get_tensor_shard__")


def items_of(value: Any, name: str) -> list[WriteItem]:
    """Give the write items of a value that follows the protocol."""
    items: list[WriteItem] = value.__create_write_items__(name, value)
    return items


def parts_of(value: Any, name: str) -> Iterator[tuple[WriteItem, torch.Tensor]]:
    """Give the write items of a value that follows the protocol, each with its tensor."""
    for item in items_of(value, name):
        yield item, value.__get_tensor_shard__(item.index).detach()


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
