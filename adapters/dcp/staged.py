"""A state dict that is staged before it is planned: its tensors are in a slot, and the planner sees them there.

mlflash stages the tensors that DCP's planners write one by one: tensors in nested dicts and lists, the local shards of
DTensors and ShardedTensors, and the parts of tensors that name their own parts (`checkpointable`). It copies everything
else. When the state dict is sent to a child process, its tensors become meta tensors, because the child only plans.
"""

from __future__ import annotations

import base64
import copy
import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.planner_helpers import _create_write_items
from torch.distributed.checkpoint.utils import find_tensor_shard
from torch.distributed.tensor import DTensor

from mlflash import Checkpointer
from mlflash.errors import SaveFailed, StateError
from mlflash.save.stage import StagedState
from mlflash.state.flatten import Flattener
from mlflash.state.layout import round_up
from mlflash.state.leaves import Entry, Flat, Leaf, Structure, dtensor_shard, is_placed, tensor_entry
from mlflash.state.plain_values import encode_key
from mlflash.storage.dcp_plans import BYTES, INDEX, Index, Key

_FIRST = 2  # number of the first tensor among the leaves
_NAMES_NBYTES = 32 << 10  # room for names of values as bytes; the planner's data gets four times the index

_ROOM_NBYTES = 64 << 10  # index and blob are padded to a multiple of this, so that the layout rarely changes
_FEW = 1.25  # a slot may be this many times as large as what this rank writes
_NOWHERE = 0
_tokens = itertools.count(1)
_in_child: dict[int, dict[Key, torch.Tensor]] = {}  # in a child process: what the planner sees of each state dict


@dataclasses.dataclass(frozen=True)
class Laid:
    """A state dict that has a layout but no plan yet."""

    keys: tuple[Key, ...]
    shapes: tuple[tuple[int, ...], ...]  # of the whole tensors
    flat: Flat  # its leaves: room for the index, room for what planners turn into bytes, then the tensors


class Layouts:
    """Lays state dicts out. For a state dict like the one before, it reuses that layout. Not collective."""

    def __init__(self) -> None:
        self._flattener = Flattener(objects=False)
        self._structure: Structure | None = None  # of the state dict whose layout is known
        self._known = Laid((), (), Flat.of([], [], []))  # without its tensors

    def lay_out(self, state_dict: Mapping[str, Any], room: tuple[int, int]) -> Laid:
        """Lay a state dict out.

        Args:
            state_dict: nested dicts and lists of tensors.
            room: bytes to set aside, at least, for the index and for what planners turn into bytes.

        Raises:
            StateError: a tensor cannot be saved, or two have the same name.
        """
        known = self._known
        taken = self._take_apart(state_dict)
        if taken is not None and taken.structure is self._structure and _has_room(known.flat, room):
            wholes = {number + _FIRST: whole for number, whole in taken.wholes.items()}
            flat = Flat(known.flat.structure, [*known.flat.values, *taken.values], [], wholes)
            return Laid(known.keys, known.shapes, flat)
        chunks = chunks_of(state_dict)
        laid = Laid(tuple(chunks), tuple(chunk.shape for chunk in chunks.values()), room_for(chunks, room))
        is_pattern = taken is not None and _are_same(laid.flat.values[_FIRST:], taken.values)
        self._structure = taken.structure if taken is not None and is_pattern else None
        self._known = Laid(laid.keys, laid.shapes, Flat(laid.flat.structure, laid.flat.values[:_FIRST], []))
        return laid

    def _take_apart(self, state_dict: Mapping[str, Any]) -> Flat | None:
        """Flatten a state dict like a state. None if that is not possible, for example because of other objects."""
        try:
            return self._flattener.flatten(state_dict)
        except StateError:
            return None


class Staged:
    """Copies of the tensors of a state dict, which training does not change.

    Args:
        checkpointer: gives the slot. If no slot is free now, the tensors are cloned instead.
        state_dict: nested dicts and lists of tensors.
        laid: the state dict's layout.
        until, owned: see `AdapterAPI.save_or_warn`.

    Attributes:
        token: its number in this process.
        ahead: the slot. None if the tensors were cloned.
    """

    def __init__(
        self, checkpointer: Checkpointer, state_dict: Mapping[str, Any], laid: Laid, until: Sequence[Any] | str,
        owned: Callable[[], Iterable[Any]],
    ):  # fmt: skip
        self.token = next(_tokens)
        self._checkpointer, self._keys, self._shapes = checkpointer, laid.keys, laid.shapes
        self._room = [room.nbytes for room in laid.flat.values[:_FIRST]]
        self.ahead: StagedState | None = checkpointer.adapting.stage_early(laid.flat, until, owned)
        if self.ahead is not None:
            self._kept = _views(self.ahead)
            # The slot becomes free when nothing refers to the state dict any more.
            weakref.finalize(self, checkpointer.adapting.give_up, self.ahead).atexit = False
        else:
            self._kept = [live.detach().to("cpu", copy=True) for live in laid.flat.values[_FIRST:]]
        self._state_dict = _swap(state_dict, iter(self._kept))

    @functools.cached_property
    def _chunks(self) -> dict[Key, Chunk]:
        """The staged tensors by key. The planner's thread makes this, so that training does not wait for it."""
        tensors = zip(self._keys, self._kept, self._shapes, strict=True)
        return {key: Chunk(key, kept, shape) for key, kept, shape in tensors}

    @functools.cached_property
    def _memory(self) -> set[int]:
        return {kept.untyped_storage()._cdata for kept in self._kept}

    def state_dict(self) -> dict[str, Any]:
        """Give the state dict for the planner. The slot is kept while anything refers to the state dict."""
        given, self._state_dict = StagedDict(self._state_dict), {}
        given.staged = self
        return given

    def has(self, key: Key, tensor: torch.Tensor) -> bool:
        """Whether a tensor is the staged one with this key, unchanged."""
        return key in self._chunks and _is_same(self._chunks[key].value, tensor)

    @property
    def is_lazy(self) -> bool:
        """Whether parts are not copied yet. Then read it only through `clone`, or after `finish`."""
        return self.ahead is not None and self.ahead.is_lazy and not self.ahead.given_up

    def finish(self) -> None:
        """Wait until all of it is copied."""
        if self.ahead is not None:
            self.ahead.finish()

    def touches(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor uses the memory of a staged tensor."""
        return tensor.untyped_storage()._cdata in self._memory

    def clone(self, key: Key) -> Chunk:
        """Copy a tensor out of the slot."""
        if self.ahead is None:
            return self._chunks[key]
        self.finish()
        chunk = Chunk(key, self._chunks[key].value.clone(), self._chunks[key].shape)
        self.check()
        return chunk

    def leaves(self, keys: Iterable[Key], index: bytes, blob: bytes) -> Flat:
        """Give leaves of copies of the tensors with these keys. If the other tensors are small, include them, too.

        Slots for all of them can then stage the next state dict of this kind.
        """
        wanted = [self.clone(key) for key in keys]
        if self.ahead is not None or _FEW * _nbytes(wanted) < _nbytes(self._chunks.values()):
            return flat_of(wanted, index, blob)
        for_index, for_blob = self._room
        return flat_of(self._chunks.values(), index.ljust(for_index, b" "), blob.ljust(for_blob, b"\0"))

    def check(self) -> None:
        """Check that the slot still belongs to this state."""
        if self.ahead is not None and self.ahead.given_up:
            raise SaveFailed("a later save began before this one was written, and took its slot")

    def give_up(self) -> None:
        if self.ahead is not None:
            self._checkpointer.adapting.give_up(self.ahead)


class StagedDict(dict[str, Any]):
    """A staged state dict. When it is sent to another process, its tensors become meta tensors.

    Attributes:
        staged: the staged tensors. None: nothing is staged; the tensors are the live ones, and nothing reads them.
    """

    staged: Staged | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        token = _NOWHERE if self.staged is None else self.staged.token
        return _arrive, (token, _swap(self, map(_meta, _chunks(self, ""))))


def chunks_of(state_dict: Mapping[str, Any]) -> dict[Key, Chunk]:
    """Give the tensors of a state dict by name and offset."""
    found: dict[Key, Chunk] = {}
    with torch.no_grad():  # faster: otherwise autograd records each shard of a DTensor
        for chunk in _chunks(state_dict, ""):
            if found.setdefault(chunk.key, chunk) is not chunk:
                raise StateError("two tensors of the state dict have this name", tensor=chunk.key[0])
    return found


def room_for(chunks: Mapping[Key, Chunk], room: tuple[int, int]) -> Flat:
    """Lay out a state dict that has no plan yet, with room for its index and for what planners turn into bytes."""
    index, _ = pack(chunks, {}, None)
    return flat_of(chunks.values(), b" " * max(5 * len(index) + _NAMES_NBYTES, room[0]), bytes(room[1]))


def in_child(key: Key, tensor: torch.Tensor) -> int | None:
    """In a child process, give the token of the state dict that a tensor comes from, if it is unchanged."""
    return next((token for token, known in _in_child.items() if _is_same(known.get(key), tensor)), None)


def _arrive(token: int, state_dict: dict[str, Any]) -> dict[str, Any]:
    _in_child.clear()
    _in_child[token] = {chunk.key: chunk.value for chunk in _chunks(state_dict, "")}
    return state_dict


def _nbytes(chunks: Iterable[Chunk]) -> int:
    return sum(chunk.value.nbytes for chunk in chunks)


def _has_room(flat: Flat, room: tuple[int, int]) -> bool:
    return all(entry.nbytes >= nbytes for entry, nbytes in zip(flat.structure.entries, room, strict=False))


def _are_same(some: list[torch.Tensor], others: list[Any]) -> bool:
    return len(some) == len(others) and all(
        isinstance(other, torch.Tensor) and _is_same(tensor, other) for tensor, other in zip(some, others, strict=True)
    )


def _views(ahead: StagedState) -> list[torch.Tensor]:
    """View the tensors that were staged in a slot. All views have one storage, which no other tensor uses."""
    ahead.uncheck()  # a planner may write to them
    layout = ahead.plan.layout
    payload = torch.from_numpy(ahead.slot.payload(layout.extents))
    leaves = [*zip(layout.entries, layout.places, strict=True)][_FIRST:]
    of_dtype = {name: payload.view(getattr(torch, name)) for name in {entry.dtype for entry, place in leaves if place}}
    return [of_dtype[entry.dtype].as_strided(*place) if place else _unseen(entry) for entry, place in leaves]


def _unseen(entry: Entry) -> torch.Tensor:
    """A tensor that is empty, or that another rank may store."""
    dtype: torch.dtype = getattr(torch, entry.dtype)
    return torch.empty(entry.shape, dtype=dtype, device="meta" if entry.nbytes else "cpu")


def _is_same(known: torch.Tensor | None, tensor: torch.Tensor) -> bool:
    if known is None or (known.dtype, known.shape) != (tensor.dtype, tensor.shape):
        return False
    if not tensor.numel():
        return True
    same_memory = known.untyped_storage()._cdata == tensor.untyped_storage()._cdata
    return same_memory and (known.storage_offset(), known.stride()) == (tensor.storage_offset(), tensor.stride())


def _meta(chunk: Chunk) -> torch.Tensor:
    return torch.empty_like(chunk.value, device="meta")


def _chunks(value: Any, path: str) -> Iterator[Chunk]:
    """Give the local tensors of a state dict, in its order."""
    prefix = path + "." if path else ""
    if isinstance(value, Mapping):
        for key, sub in value.items():
            yield from _chunks(sub, f"{prefix}{key}")
    elif isinstance(value, list):
        for i, sub in enumerate(value):
            yield from _chunks(sub, f"{prefix}{i}")
    elif isinstance(value, DTensor):
        local, _, offset = dtensor_shard(value, path)
        yield Chunk((path, offset), local.detach(), tuple(value.shape), value)
    elif isinstance(value, ShardedTensor):
        size = tuple(value.metadata().size)
        for shard in value.local_shards():
            yield Chunk((path, tuple(shard.metadata.shard_offsets)), shard.tensor.detach(), size)
    elif is_checkpointable(value):
        for item, part in parts_of(value, path):
            assert item.tensor_data is not None
            yield Chunk((path, tuple(item.tensor_data.chunk.offsets)), part, tuple(item.tensor_data.size))
    elif isinstance(value, torch.Tensor):
        yield Chunk((path, (0,) * value.ndim), value.detach(), tuple(value.shape))


def _swap(value: Any, tensors: Iterator[torch.Tensor], path: str = "") -> Any:
    """Copy a state dict with its local tensors replaced by others, which come in the order of `_chunks`."""
    if type(value) in (torch.Tensor, torch.nn.Parameter) and not is_checkpointable(value):  # most are: ask this first
        return next(tensors)
    prefix = path + "." if path else ""
    if isinstance(value, Mapping):
        return {key: _swap(sub, tensors, f"{prefix}{key}") for key, sub in value.items()}
    if isinstance(value, list):
        return [_swap(sub, tensors, f"{prefix}{i}") for i, sub in enumerate(value)]
    if isinstance(value, DTensor):
        # Not from_local, which moves the tensor to the device of the mesh and takes ten times as long.
        return DTensor(next(tensors), value._spec, requires_grad=False)
    if isinstance(value, ShardedTensor):
        return _sharded_like(value, tensors)
    if is_checkpointable(value):
        items = items_of(value, path)
        return Parts(items, [next(tensors) for _ in items]) if items else _copy(value)
    if isinstance(value, torch.Tensor):
        return next(tensors)
    return _copy(value)


def _sharded_like(value: ShardedTensor, tensors: Iterator[torch.Tensor]) -> ShardedTensor:
    """Make a ShardedTensor of other local tensors. Its constructors would need these on the same device."""
    made = ShardedTensor.__new__(
        ShardedTensor, value.sharding_spec(), value.size(), dtype=value.dtype, layout=value.layout,
        pin_memory=False, requires_grad=False,
    )  # fmt: skip
    made._prepare_init(process_group=value._process_group, init_rrefs=False)
    made._metadata = value.metadata()
    for shard in value.local_shards():
        other = copy.copy(shard)
        other.tensor = next(tensors)
        made._local_shards.append(other)
    for name in vars(value).keys() - vars(made).keys():  # Megatron Core up to 0.15 sets attributes on them
        setattr(made, name, getattr(value, name))
    return made


def _copy(value: Any) -> Any:
    """Copy a value that planners do not write tensor by tensor."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) is tuple:
        return tuple(_copy(item) for item in value)
    return copy.deepcopy(value)


# Tensors that name their own parts for a checkpoint, by one of PyTorch's protocols. `_Checkpointable` is a class with
# methods. `CheckpointableTensor`, since PyTorch 2.14, is a tensor with attributes.


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
    """Replaces a tensor by other tensors, one for each of its write items. A planner finds the same items in it."""

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


# The leaves of a slot. A tensor of a plan (or a chunk of one) becomes an entry with its name, its shape and its offset
# in the whole tensor, as in any other checkpoint of mlflash. All values that a planner turned into bytes (`BYTE_IO`)
# are in one entry, the blob. The index says where in it each value is, and which tensors belong to the checkpoint. The
# slot may hold more tensors if a state was staged before it was planned.


@dataclasses.dataclass(frozen=True)
class Chunk:
    """The part of a tensor that this rank has."""

    key: Key  # name of the tensor, and offset of the part in it
    value: torch.Tensor  # the part, on any device, with any strides
    shape: tuple[int, ...]  # of the whole tensor
    whole: Any = None  # the DTensor, if the part is a shard of one


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
    """Make leaves of chunks, index and blob. The index and the blob are leaves 0 and 1, and padded."""
    leaves = [_bytes_leaf(INDEX, index, b" "), _bytes_leaf(BYTES, blob, b"\0")]
    tree: list[Any] = [[INDEX, ["e", 0]], [BYTES, ["e", 1]]]
    memory: dict[Any, int] = {}
    names = {INDEX: 1, BYTES: 1}
    for chunk in chunks:
        name, offset = chunk.key
        count = names[name] = names.get(name, 0) + 1
        value, entry, place = tensor_entry(torch, chunk.value, name if count == 1 else f"{name}~{count}")
        entry = msgspec.structs.replace(entry, global_shape=chunk.shape, offset=offset)
        tie = -1 if place is None else memory.setdefault((place, chunk.shape, offset), len(leaves))
        tree.append([encode_key((name, *offset), name), ["e", len(leaves)]])
        leaves.append(Leaf(entry, value, -1 if tie == len(leaves) else tie, chunk.whole))
    return Flat.of(leaves, ["d", tree], [], frozenset((INDEX, BYTES)))


def _bytes_leaf(name: str, content: bytes, blank: bytes) -> Leaf:
    raw = np.frombuffer(content.ljust(round_up(max(1, len(content)), _ROOM_NBYTES), blank), dtype=np.uint8)
    return Leaf(Entry(name, "array", raw.dtype.str, raw.shape, (0,), raw.shape, 0, raw.nbytes), raw, -1)
