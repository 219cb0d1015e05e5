"""A `StorageReader` that reads what DCP plans from the memory of the nodes.

Each part of a tensor comes from a rank that has it. If a file of this node has the part, it is read from there straight
into its destination; otherwise another node sends it. It does not matter which ranks saved it, and how many.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import math
import os
from collections.abc import Iterator, Set
from typing import Any

import msgspec
import numpy as np
import torch
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.default_planner import set_element
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from mlflash import Checkpointer
from mlflash.channel.wanted_parts import WantedPart
from mlflash.checkpointer.off import turned_off
from mlflash.errors import StepNotFound, StructureMismatch
from mlflash.restore.open_in_memory import OpenCheckpoint
from mlflash.state.leaves import Entry, from_bytes
from mlflash.state.old_ranks import OldRank
from mlflash.state.plain_values import decode_plain
from mlflash.storage.dcp_files import pickled
from mlflash.storage.dcp_plans import BYTES_NUMBER, INDEX, Index, Key, keys_of

from ..ids import names_a_step, step_of

log = logging.getLogger("mlflash")


class MemoryReader(StorageReader):
    """Loads from the memory of the nodes what DCP plans.

    It loads checkpoints that a `MemoryWriter` or a Checkpointer saved. The step comes from ``checkpoint_id`` (see
    `step_of`); without an id it is the newest.

    You can make a reader on each rank by itself. DCP's calls with it are collective over the Checkpointer's comm, which
    must have the ranks of DCP's process group.

    Args:
        checkpointer: must stay open while you use the reader.
        source: another directory that checkpoints were drained to. The reader only reads there, and ignores memory.
        enabled: False: the reader finds no checkpoint, as if the Checkpointer were off.
    """

    def __init__(self, checkpointer: Checkpointer, source: str | os.PathLike[str] | None = None, enabled: bool = True):
        self._checkpointer = checkpointer
        self.enabled = checkpointer.enabled and not turned_off(enabled)
        self._source = None if source is None else os.fspath(source)
        self._id: str | os.PathLike[str] | int | None = None
        self._opened: OpenCheckpoint | None = None
        self._catalog: _Catalog | None = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return names_a_step(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._id = checkpoint_id

    def read_metadata(self) -> Metadata:
        """Find the checkpoint, verify every byte of it, and list what it contains. Collective."""
        checkpoint_id, self._id = self._id, None
        self._opened = self._open(None if checkpoint_id is None else step_of(checkpoint_id))
        if self._opened is None:
            why = "there is no checkpoint in memory" + ("" if self.enabled else ": mlflash is off")
            raise StepNotFound(why)
        self._catalog = _Catalog(self._opened)
        return self._catalog.metadata(f"step-{self._opened.step:08d}")

    def bytes_of(self, name: str, step: int | None = None) -> tuple[int, bytes] | None:
        """Read the bytes that a planner made of a value that is not a tensor. Collective."""
        opened = self._open(step)
        if opened is None:
            return None
        place = _Catalog(opened).bytes.get(name)
        if place is None:
            opened.close()
            raise StructureMismatch("the checkpoint does not contain this value", tensor=name, step=opened.step)
        rank, number, start, end = place
        arrived = np.empty((end - start, 1), dtype=np.uint8)
        wanted_part = WantedPart(rank, number, (start,), (end - start,), arrived)
        self._checkpointer.adapting.read(opened, lambda: [wanted_part], lambda: None, anew=True)
        return opened.step, arrived.tobytes()

    def _check(self, wanted: Set[str], present: Set[str]) -> None:
        """Check what this rank wants against what is present, by names. All ranks raise what this raises."""

    def _open(self, step: int | None) -> OpenCheckpoint | None:
        if self._opened is not None:  # a load that failed before it read
            self._opened.close()
            self._opened = None
        if not self.enabled:
            return None
        return self._checkpointer.adapting.open(step, told=(INDEX,), source=self._source)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: no setup is needed."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what is planned into its destination. Collective. All ranks raise an error of any rank."""
        assert self._opened is not None and self._catalog is not None, "read_metadata comes first"
        reading, present = _Reading(self._catalog, plan, planner), self._catalog.names
        opened, self._opened, self._catalog = self._opened, None, None

        def wanted_parts() -> Iterator[WantedPart]:
            self._check({item.storage_index.fqn for item in plan.items}, present)
            return reading.wanted_parts()

        self._checkpointer.adapting.read(opened, wanted_parts, reading.finish)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def latest(checkpointer: Checkpointer, instead: object = None) -> str | None:
    """Give the id of the newest checkpoint that can be loaded, such as ``"step-00000012"``. None if there is none.

    Collective over the Checkpointer's comm. It verifies every byte of the checkpoint. If the newest is damaged beyond
    repair, it gives an older one. The newest is the one that was saved last.

    Args:
        checkpointer: the Checkpointer of the job.
        instead: what training can start from otherwise, such as the path of a checkpoint on disk; the same on all
            ranks. If you give it and no checkpoint in memory can be loaded, the call logs a warning and gives None.
            Default: nothing.

    Raises:
        Unrestorable: there are checkpoints, but none can be loaded, and you gave nothing as ``instead``.
    """
    step = checkpointer.adapting.newest_step(instead) if checkpointer.enabled else None
    return None if step is None else f"step-{step:08d}"


class SafeLoadPlanner(DefaultLoadPlanner):
    """DCP's planner, which runs no code from a checkpoint: of values that are not tensors it loads plain data only."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a value that is not a tensor in its place."""
        name, loaded = read_item.dest_index.fqn, torch.load(value, weights_only=True)
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], loaded)
        else:
            self.state_dict[name] = loaded


class _Catalog:
    """What a checkpoint contains, and where each part is."""

    def __init__(self, opened: OpenCheckpoint):
        self._opened = opened
        self.chunks: dict[Key, list[tuple[int, int, Entry]]] = {}
        self.bytes: dict[str, tuple[int, int, int, int]] = {}  # rank, entry, start, end
        self.plain: dict[str, Any] = {}  # for a checkpoint that was not saved through DCP
        self._written: dict[Key, None] = {}
        self._planner_data: Any = None
        for rank, old in opened.olds.items():
            self._add(rank, old)

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self._written}

    def metadata(self, name: str) -> Metadata:
        tensors: dict[str, TensorStorageMetadata] = {}
        for key in self._written:
            _, _, entry = self.chunks[key][0]
            dtype = _torch_dtype(entry)
            assert dtype is not None
            known = tensors.setdefault(key[0], TensorStorageMetadata(TensorProperties(dtype=dtype),
                                                                     torch.Size(entry.global_shape), []))  # fmt: skip
            known.chunks.append(ChunkStorageMetadata(torch.Size(entry.offset), torch.Size(entry.shape)))
        for known in tensors.values():
            known.chunks.sort(key=lambda chunk: tuple(chunk.offsets))
        others = {name: BytesStorageMetadata() for name in (*self.bytes, *self.plain)}
        meta = StorageMeta(checkpoint_id=name, load_id=name)
        return Metadata({**tensors, **others}, planner_data=self._planner_data, storage_meta=meta)

    def source(self, item: ReadItem) -> tuple[int, int, Entry]:
        """Give the rank, the number of the entry and the entry to read a tensor of a plan from: the nearest."""
        offset = item.storage_index.offset
        fqn = item.storage_index.fqn
        key = (fqn, tuple(offset)) if offset is not None else next(key for key in self._written if key[0] == fqn)
        return min(self.chunks[key], key=lambda place: self._opened.distance(place[0]))

    def _add(self, rank: int, old: OldRank) -> None:
        if INDEX not in old.content:
            numbers = {(e.name, e.offset): n for n, e in enumerate(old.entries) if _torch_dtype(e) is not None}
            self.plain |= {path: decode_plain(value) for path, value in old.plain.items() if path not in self.plain}
            self._written |= dict.fromkeys(numbers)
        else:
            index, numbers = Index.decode(old.content[INDEX]), keys_of(old.tree)
            self._written |= dict.fromkeys(index.tensors)
            self._planner_data = index.kept() or self._planner_data
            self.bytes |= {name: (rank, BYTES_NUMBER, *place) for name, place in index.parts.items()}
        for key, number in numbers.items():
            self.chunks.setdefault(key, []).append((rank, number, old.entries[number]))


@dataclasses.dataclass
class _Wanted:
    """One item of a plan: where its bytes arrive, and the live tensor if that has other memory."""

    item: ReadItem
    arrived: np.ndarray | None
    live: torch.Tensor | None
    entry: Entry | None


class _Reading:
    """One rank's plan while it is read."""

    def __init__(self, catalog: _Catalog, plan: LoadPlan, planner: LoadPlanner):
        self._catalog, self._plan, self._planner = catalog, plan, planner
        self._wanted: list[_Wanted] = []

    def wanted_parts(self) -> Iterator[WantedPart]:
        """List the parts to read and their destinations. Parts of one file come one after the other."""
        tensors = []
        for item in self._plan.items:
            if item.type is LoadItemType.BYTE_IO:
                yield from self._bytes(item)
            else:
                tensors.append((item, self._catalog.source(item)))
        for item, place in sorted(tensors, key=lambda tensor: tensor[1][0]):
            yield from self._tensor(item, *place)

    def finish(self) -> None:
        for wanted in self._wanted:
            name = wanted.item.dest_index.fqn
            if wanted.item.type is LoadItemType.BYTE_IO:
                raw = pickled(self._catalog.plain[name]) if wanted.arrived is None else wanted.arrived.tobytes()
                self._planner.load_bytes(wanted.item, io.BytesIO(raw))
                continue
            assert wanted.live is not None
            if wanted.arrived is not None and wanted.entry is not None:
                wanted.live.copy_(torch.as_tensor(from_bytes(wanted.entry, wanted.arrived.reshape(-1))))
            self._planner.commit_tensor(wanted.item, wanted.live)

    def _bytes(self, item: ReadItem) -> Iterator[WantedPart]:
        name = item.storage_index.fqn
        if name not in self._catalog.bytes:
            self._wanted.append(_Wanted(item, None, None, None))
            return
        rank, number, start, end = self._catalog.bytes[name]
        arrived = np.empty((end - start, 1), dtype=np.uint8)
        self._wanted.append(_Wanted(item, arrived, None, None))
        yield WantedPart(rank, number, (start,), (end - start,), arrived)

    def _tensor(self, item: ReadItem, rank: int, number: int, entry: Entry) -> Iterator[WantedPart]:
        live = self._planner.resolve_tensor(item).detach()
        shape = tuple(item.lengths)
        if tuple(live.shape) != shape:
            raise StructureMismatch("the planner gave a tensor of another shape", tensor=entry.name, expected=shape,
                                    found=tuple(live.shape))  # fmt: skip
        if not live.numel():
            self._wanted.append(_Wanted(item, None, live, entry))
            return
        target = _as_items(live) if str(live.dtype).removeprefix("torch.") == entry.dtype else None
        if target is None:  # another device or dtype: read into a buffer first
            item_nbytes = entry.nbytes // math.prod(entry.shape)
            part = msgspec.structs.replace(entry, shape=shape, nbytes=live.numel() * item_nbytes)
            arrived = np.empty((*shape, item_nbytes), dtype=np.uint8)
            target = arrived
            self._wanted.append(_Wanted(item, arrived, live, part))
        else:
            self._wanted.append(_Wanted(item, None, live, None))
        yield WantedPart(rank, number, tuple(item.storage_offsets), shape, target)


def _torch_dtype(entry: Entry) -> Any:
    """Give the dtype under which DCP knows an entry. None if PyTorch has no arrays of this dtype."""
    if entry.kind == "tensor":
        return getattr(torch, entry.dtype)
    try:
        return torch.from_numpy(np.empty(0, dtype=np.dtype(entry.dtype))).dtype
    except TypeError:
        return None


def _as_items(live: torch.Tensor) -> np.ndarray | None:
    """View a tensor's memory as ``(*shape, item bytes)`` uint8. None if that is not possible."""
    same = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
    if live.device.type != "cpu" or live.is_conj() or live.is_neg() or live.element_size() not in same:
        return None
    raw: np.ndarray = live.view(same[live.element_size()]).numpy()
    return raw[..., None].view(np.uint8)
