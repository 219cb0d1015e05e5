"""What a plan writes ↔ the leaves of a slot: tensors, one blob for all that is bytes, and the index of both.

A tensor of the plan (or a chunk of one) becomes an entry of the slot with its name, shape and place in the whole, as
in any other checkpoint of mlflash. What a planner made bytes (`BYTE_IO`) lies in one entry; the index says where, and
which tensors belong to the checkpoint: the slot may hold more, where a state was staged before it was planned.
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

_ROOM_NBYTES = 64 << 10  # index and bytes take a multiple of this, so that the layout stays as it is from save to save


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A tensor, or a part of one, as this rank has it.

    Attributes:
        key: its name and where it begins.
        value: the part; on any device, of any strides.
        shape: of the whole tensor.
        whole: the DTensor it is the shard of, if it is one.
    """

    key: Key
    value: torch.Tensor
    shape: tuple[int, ...]
    whole: Any = None


def pack(keys: Iterable[Key], parts: Mapping[str, bytes], planner_data: bytes | None) -> tuple[bytes, bytes]:
    """Make index and blob of what a plan writes."""
    places, at = {}, 0
    for name, raw in parts.items():
        places[name] = (at, at + len(raw))
        at += len(raw)
    own = None if planner_data is None else base64.b64encode(planner_data).decode()
    return Index(tuple(keys), places, own).encode(), b"".join(parts.values())


def cloned(chunk: Chunk) -> Chunk:
    """With a value that nobody else has."""
    return dataclasses.replace(chunk, value=chunk.value.to("cpu", copy=True))


def key_of(item: WriteItem) -> Key:
    """Of an item that is a tensor or a shard."""
    assert item.tensor_data is not None
    return item.index.fqn, tuple(item.tensor_data.chunk.offsets)


def flat_of(chunks: Iterable[Chunk], index: bytes, blob: bytes) -> Flat:
    """Make leaves of chunks, index and blob; the last two are leaves 0 and 1, and padded.

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
