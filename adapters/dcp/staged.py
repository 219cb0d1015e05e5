"""A state dict staged before it is planned: its tensors lie in a slot, and a planner sees them there.

Staged are the tensors that DCP's planners write one by one: those in nested dicts and lists, the local shards of
DTensors and ShardedTensors. All else is copied. Where the state dict is sent to a child process, its tensors become
meta tensors: the child only plans.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

from mlflash import Checkpointer
from mlflash.errors import SaveFailed, StateError
from mlflash.saves import Ahead
from mlflash.state import Flat, dtensor_shard, from_bytes

from .leaves import Chunk, Key, flat_of, pack

_FIRST = 2  # number of the first tensor among the leaves
_NAMES_NBYTES = 32 << 10  # set aside for the names of what a planner makes bytes; for its own data, twice the index

_tokens = itertools.count(1)
_in_child: dict[int, dict[Key, torch.Tensor]] = {}  # in a child process: what the planner sees of each state dict


class Staged:
    """The tensors of a state dict, out of reach of training.

    Not collective.

    Args:
        checkpointer: whose slot they go to, where one can be had now; else they are cloned.
        state_dict: nested dicts and lists of tensors.
        blob_nbytes: bytes to set aside for what planners make bytes.

    Attributes:
        token: number of it in this process.
        ahead: the slot; None where they were cloned.

    Raises:
        StateError: a tensor cannot be saved.
    """

    def __init__(self, checkpointer: Checkpointer, state_dict: Mapping[str, Any], blob_nbytes: int):
        self.token = next(_tokens)
        self._checkpointer = checkpointer
        live = chunks_of(state_dict)
        self.ahead: Ahead | None = checkpointer.stage_ahead(room_for(live, blob_nbytes))
        self._chunks = {
            key: Chunk(key, _kept(chunk.value, self.ahead, number), chunk.shape)
            for number, (key, chunk) in enumerate(live.items(), _FIRST)
        }
        self._memory = {chunk.value.untyped_storage()._cdata for chunk in self._chunks.values()}
        if self.ahead is not None:  # the slot is free again when nobody has the state dict any more
            weakref.finalize(self, checkpointer.give_up, self.ahead).atexit = False
        self._state_dict = _swap(state_dict, "", lambda chunk: self._chunks[chunk.key].value)

    def state_dict(self) -> dict[str, Any]:
        """What a planner is to be given; the slot is kept for as long as somebody has it."""
        given, self._state_dict = StagedDict(self._state_dict), {}
        given.staged = self
        return given

    def has(self, key: Key, tensor: torch.Tensor) -> bool:
        """Whether a tensor is the staged one of its name, as it was."""
        return key in self._chunks and _is_same(self._chunks[key].value, tensor)

    def touches(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in memory of this."""
        return tensor.untyped_storage()._cdata in self._memory

    def clone(self, key: Key) -> Chunk:
        """Copy a tensor out of the slot.

        Raises:
            SaveFailed: the slot was given to another save.
        """
        if self.ahead is None:
            return self._chunks[key]
        chunk = Chunk(key, self._chunks[key].value.clone(), self._chunks[key].shape)
        self.check()
        return chunk

    def check(self) -> None:
        """Look whether the slot is still that of this state.

        Raises:
            SaveFailed: it was given to another save.
        """
        if self.ahead is not None and self.ahead.given_up:
            raise SaveFailed("a later save has begun, and the slot of this one was given to it")

    def give_up(self) -> None:
        """Let other saves have the slot."""
        if self.ahead is not None:
            self._checkpointer.give_up(self.ahead)


class StagedDict(dict[str, Any]):
    """A staged state dict, which becomes one of meta tensors when it is sent to another process."""

    staged: Staged

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (self.staged.token, _swap(self, "", _meta))


def chunks_of(state_dict: Mapping[str, Any]) -> dict[Key, Chunk]:
    """The tensors of a state dict, by name and place.

    Raises:
        StateError: two have the same name.
    """
    found: dict[Key, Chunk] = {}

    def note(chunk: Chunk) -> torch.Tensor:
        if found.setdefault(chunk.key, chunk) is not chunk:
            raise StateError("two tensors of the state dict have this name", tensor=chunk.key[0])
        return chunk.value

    _swap(state_dict, "", note)
    return found


def room_for(chunks: Mapping[Key, Chunk], blob_nbytes: int) -> Flat:
    """Lay a state dict out that is not planned yet, with room for its index, and for as many bytes."""
    index, _ = pack(chunks, {}, None)
    return flat_of(chunks.values(), b" " * (3 * len(index) + _NAMES_NBYTES), bytes(blob_nbytes))


def in_child(key: Key, tensor: torch.Tensor) -> int | None:
    """In a child: the token of the state dict that a tensor is from, if it is as it came."""
    return next((token for token, known in _in_child.items() if _is_same(known.get(key), tensor)), None)


def _arrive(token: int, state_dict: dict[str, Any]) -> dict[str, Any]:
    known: dict[Key, torch.Tensor] = {}

    def note(chunk: Chunk) -> torch.Tensor:
        known[chunk.key] = chunk.value
        return chunk.value

    _swap(state_dict, "", note)
    _in_child.clear()
    _in_child[token] = known
    return state_dict


def _kept(live: torch.Tensor, ahead: Ahead | None, leaf: int) -> torch.Tensor:
    if ahead is None:
        return live.clone()
    raw = ahead.bytes_of(leaf)
    blank: torch.Tensor = torch.empty(live.shape, dtype=live.dtype, device="meta")
    return blank if raw is None else from_bytes(ahead.plan.layout.entries[leaf], raw)


def _is_same(known: torch.Tensor | None, tensor: torch.Tensor) -> bool:
    if known is None or (known.dtype, known.shape) != (tensor.dtype, tensor.shape):
        return False
    if not tensor.numel():
        return True
    same_memory = known.untyped_storage()._cdata == tensor.untyped_storage()._cdata
    return same_memory and (known.storage_offset(), known.stride()) == (tensor.storage_offset(), tensor.stride())


def _meta(chunk: Chunk) -> torch.Tensor:
    return torch.empty_like(chunk.value, device="meta")


def _swap(value: Any, path: str, new: Callable[[Chunk], torch.Tensor]) -> Any:
    """Copy a state dict, with other tensors in the place of its local ones."""
    prefix = path + "." if path else ""
    if isinstance(value, Mapping):
        return {key: _swap(sub, f"{prefix}{key}", new) for key, sub in value.items()}
    if isinstance(value, list):
        return [_swap(sub, f"{prefix}{i}", new) for i, sub in enumerate(value)]
    if isinstance(value, DTensor):
        local, _, offset = dtensor_shard(value.detach(), path)
        other = new(Chunk((path, offset), local, tuple(value.shape), value))
        return DTensor.from_local(other, value.device_mesh, value.placements, run_check=False, shape=value.shape,
                                  stride=value.stride())  # fmt: skip
    if isinstance(value, ShardedTensor):
        size = tuple(value.metadata().size)
        shards = [
            LocalShard(new(Chunk((path, tuple(s.metadata.shard_offsets)), s.tensor.detach(), size)), s.metadata)
            for s in value.local_shards()
        ]
        return ShardedTensor._init_from_local_shards_and_global_metadata(
            shards, value.metadata(), process_group=value._process_group, init_rrefs=False
        )
    if isinstance(value, torch.Tensor):
        zero = (0,) * value.ndim
        return new(Chunk((path, zero), value.detach(), tuple(value.shape)))
    return _copy(value)


def _copy(value: Any) -> Any:
    """Copy what no planner writes by itself."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) is tuple:
        return tuple(_copy(item) for item in value)
    return copy.deepcopy(value)
