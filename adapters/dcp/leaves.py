"""Convert what a plan writes to the leaves of a slot: tensors, one blob of bytes, and an index of both.

A tensor of the plan (or a chunk of one) becomes an entry of the slot with its name, its shape and its offset in the
whole tensor, as in any other checkpoint of mlflash. All values that a planner turned into bytes (`BYTE_IO`) are in one
entry, the blob. The index says where in it each value is, and which tensors belong to the checkpoint. The slot may hold
more tensors if a state was staged before it was planned.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.planner import WriteItem

from mlflash.state.layout import round_up
from mlflash.state.leaves import Entry, Flat, Leaf, tensor_entry
from mlflash.state.plain_values import encode_key
from mlflash.storage.dcp_plans import BYTES, INDEX, Index, Key

_ROOM_NBYTES = 64 << 10  # index and blob are padded to a multiple of this, so that the layout rarely changes


@dataclasses.dataclass(frozen=True)
class Chunk:
    """The part of a tensor that this rank has.

    Attributes:
        key: name of the tensor, and offset of the part in it.
        value: the part, on any device, with any strides.
        shape: shape of the whole tensor.
        whole: the DTensor, if the part is a shard of one.
    """

    key: Key
    value: torch.Tensor
    shape: tuple[int, ...]
    whole: Any = None


def pack(keys: Iterable[Key], parts: Mapping[str, bytes], planner_data: bytes | None) -> tuple[bytes, bytes]:
    """Make the index and the blob of what a plan writes."""
    places, at = {}, 0
    for name, raw in parts.items():
        places[name] = (at, at + len(raw))
        at += len(raw)
    own = None if planner_data is None else base64.b64encode(planner_data).decode()
    return Index(tuple(keys), places, own).encode(), b"".join(parts.values())


def cloned(chunk: Chunk) -> Chunk:
    """Copy a chunk, with its value, to the CPU."""
    return dataclasses.replace(chunk, value=chunk.value.to("cpu", copy=True))


def key_of(item: WriteItem) -> Key:
    """Give the key of an item that is a tensor or a shard."""
    assert item.tensor_data is not None
    return item.index.fqn, tuple(item.tensor_data.chunk.offsets)


def flat_of(chunks: Iterable[Chunk], index: bytes, blob: bytes) -> Flat:
    """Make leaves of chunks, index and blob. The index and the blob are leaves 0 and 1, and padded.

    Raises:
        StateError: a tensor cannot be saved.
    """
    leaves = [_bytes_leaf(INDEX, index, b" "), _bytes_leaf(BYTES, blob, b"\0")]
    tree: list[Any] = [[INDEX, ["e", 0]], [BYTES, ["e", 1]]]
    memory: dict[Any, int] = {}
    names = {INDEX: 1, BYTES: 1}
    for chunk in chunks:
        name, offset = chunk.key
        count = names[name] = names.get(name, 0) + 1
        value, entry, place = tensor_entry(torch, chunk.value, name if count == 1 else f"{name}~{count}")
        entry = dataclasses.replace(entry, global_shape=chunk.shape, offset=offset)
        tie = -1 if place is None else memory.setdefault((place, chunk.shape, offset), len(leaves))
        tree.append([encode_key((name, *offset), name), ["e", len(leaves)]])
        leaves.append(Leaf(entry, value, -1 if tie == len(leaves) else tie, chunk.whole))
    return Flat.of(leaves, ["d", tree], [], frozenset((INDEX, BYTES)))


def _bytes_leaf(name: str, content: bytes, blank: bytes) -> Leaf:
    raw = np.frombuffer(content.ljust(round_up(max(1, len(content)), _ROOM_NBYTES), blank), dtype=np.uint8)
    return Leaf(Entry(name, "array", raw.dtype.str, raw.shape, (0,), raw.shape, 0, raw.nbytes), raw, -1)
