"""Tensors that say themselves which parts of them are written, staged for a DCP save."""

from __future__ import annotations

import io
import pickle

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import _create_write_items
from torch.distributed.checkpoint.utils import find_state_dict_object

from mlflash.adapters.dcp.staged import Parts, is_checkpointable, parts_of


def item(name: str, offset: int, part: torch.Tensor) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size([offset]), part.size())
    data = TensorWriteData(chunk, TensorProperties(dtype=part.dtype), torch.Size([100]))
    return WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def test_a_planner_finds_in_a_stand_in_what_it_found_before() -> None:
    parts = [torch.arange(10.0), torch.arange(20.0) * 2]
    items = [item("w", 0, parts[0]), item("w", 50, parts[1])]
    made = Parts(items, parts)
    assert is_checkpointable(made) and not is_checkpointable(parts[0])
    assert made.shape == (100,) and made.dtype == torch.float32
    assert _create_write_items("w", made) == items == [found for found, _ in parts_of(made, "w")]
    for wanted, part in zip(items, parts, strict=True):
        assert find_state_dict_object({"w": made}, wanted.index) is part
    assert [chunk.offsets for chunk in made.__create_chunk_list__()] == [torch.Size([0]), torch.Size([50])]
    with pytest.raises(NotImplementedError):
        made + 1


def test_it_can_be_sent_to_another_process() -> None:
    parts = [torch.empty(10, device="meta"), torch.arange(5)]
    made = pickle.load(io.BytesIO(pickle.dumps(Parts([item("w", 0, parts[0]), item("w", 50, parts[1])], parts))))
    assert [tuple(part.shape) for _, part in parts_of(made, "w")] == [(10,), (5,)]
    assert torch.equal(made.__get_tensor_shard__(MetadataIndex("w", torch.Size([50]))), torch.arange(5))
