"""What a plan writes ↔ the leaves of a slot: tensors, one blob for all that is bytes, and the index of both.

A tensor of the plan (or a chunk of one) becomes an entry of the slot with its name, shape and place in the whole, as
in any other checkpoint of mlflash. What a planner made bytes (`BYTE_IO`) lies in one entry; the index says where, and
which tensors belong to the checkpoint: the slot may hold more, where a state was staged before it was planned.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.planner import WriteItem

from mlflash.errors import CorruptSlot
from mlflash.layout import round_up
from mlflash.state import Entry, Flat, Leaf, Tree, decode_plain, encode_key, tensor_entry

INDEX, BYTES = ".dcp.index", ".dcp.bytes"
BYTES_NUMBER = 1  # the blob is the second leaf, see `flat_of`
_ROOM_NBYTES = 64 << 10  # index and bytes take a multiple of this, so that the layout stays as it is from save to save

Key = tuple[str, tuple[int, ...]]
"""Name of a tensor, and where the chunk begins in it."""


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


@dataclasses.dataclass(frozen=True)
class Index:
    """Which of a slot's entries belong to the checkpoint.

    Attributes:
        tensors: those this rank writes.
        parts: what is bytes, by name: where it begins and ends in the blob.
        planner_data: what the planner keeps with the checkpoint, as `torch.save` wrote it, in base64; on one rank.
    """

    tensors: tuple[Key, ...]
    parts: dict[str, tuple[int, int]]
    planner_data: str | None = None

    def encode(self) -> bytes:
        """As JSON."""
        return json.dumps(vars(self), separators=(",", ":")).encode()

    @staticmethod
    def decode(text: bytes) -> Index:
        """Undo `encode`; blanks may follow.

        Raises:
            CorruptSlot: it is none.
        """
        try:
            found = json.loads(text)
            tensors = tuple((str(name), tuple(int(n) for n in offset)) for name, offset in found["tensors"])
            places = {str(name): (int(start), int(end)) for name, (start, end) in found["parts"].items()}
            return Index(tensors, places, found["planner_data"])
        except (ValueError, TypeError, LookupError) as error:
            raise CorruptSlot(f"the index of a DCP checkpoint is damaged: {error!r}") from None


def pack(keys: Iterable[Key], parts: Mapping[str, bytes], planner_data: bytes | None) -> tuple[bytes, bytes]:
    """Make index and blob of what a plan writes."""
    places, at = {}, 0
    for name, raw in parts.items():
        places[name] = (at, at + len(raw))
        at += len(raw)
    own = None if planner_data is None else base64.b64encode(planner_data).decode()
    return Index(tuple(keys), places, own).encode(), b"".join(parts.values())


def saved_bytes(value: Any) -> bytes:
    """What `torch.save` makes of a value, as DCP's planners do of all that is no tensor."""
    raw = io.BytesIO()
    torch.save(value, raw)
    return raw.getvalue()


def cloned(chunk: Chunk) -> Chunk:
    """With a value that nobody else has."""
    return dataclasses.replace(chunk, value=chunk.value.to("cpu", copy=True))


def key_of(item: WriteItem) -> Key:
    """Of an item that is a tensor or a shard."""
    assert item.tensor_data is not None
    return item.index.fqn, tuple(item.tensor_data.chunk.offsets)


def keys_of(tree: Tree) -> dict[Key, int]:
    """The tensors of a slot, and the numbers of their entries; undoes `flat_of`.

    Raises:
        CorruptSlot: it does not come from there.
    """
    try:
        keys = [(decode_plain(key), number) for key, (_, number) in tree[1]]
        return {(str(key[0]), tuple(key[1:])): number for key, number in keys if isinstance(key, tuple)}
    except (ValueError, TypeError, LookupError) as error:
        raise CorruptSlot(f"the tree of a DCP checkpoint is damaged: {error!r}") from None


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
    return Flat(leaves, ["d", tree], [], frozenset((INDEX, BYTES)))


def _bytes_leaf(name: str, content: bytes, blank: bytes) -> Leaf:
    raw = np.frombuffer(content.ljust(round_up(max(1, len(content)), _ROOM_NBYTES), blank), dtype=np.uint8)
    return Leaf(Entry(name, "array", raw.dtype.str, raw.shape, (0,), raw.shape, 0, raw.nbytes), raw, -1)
