"""Plan → slot → commit: a `StorageWriter` of the memory of the nodes.

    dcp.save                  what the plan says is copied into a slot; then protect and commit
    dcp.async_save, THREAD    `stage` copies into the slot at once; the thread plans, and what it plans is there already
    dcp.async_save, PROCESS   the same; a child plans, with meta tensors, and asks this process for the rest

Ranks do not wait for each other before `finish`, where rank 0 waits for the commit: `dcp.save` gathers and tells all
ranks what failed before that. A rank that failed has then missed a step that the others have begun; their next save
ends it.
"""

from __future__ import annotations

import dataclasses
import io
import os
import weakref
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from mlflash import Checkpointer
from mlflash.errors import MlflashError, SaveFailed, StateError
from mlflash.snapshot import Snapshot

from .ids import step_of
from .leaves import Chunk, Key, cloned, flat_of, key_of, pack
from .process import Door, open_door
from .staged import Staged, chunks_of, in_child, room_for


@dataclasses.dataclass
class _Written:
    """What one rank's plan says.

    Attributes:
        step: of the checkpoint; None: the next one.
        keys: the tensors.
        parts: what is bytes, by name.
        chunks: the tensors; none where they were staged, and are as they were.
        token: of what was staged; 0: nothing.
    """

    step: int | None
    keys: list[Key]
    parts: dict[str, bytes]
    chunks: list[Chunk]
    token: int = 0


class MemoryWriter(StorageWriter):
    """Saves what DCP plans in the memory of the nodes, protected and committed like any checkpoint of a Checkpointer.

    It is its own `AsyncStager`. The step comes from ``checkpoint_id`` (see `step_of`); without one it is the next. The
    newest step may be saved once more; the older content is replaced when the new one is committed.

    Not collective; what DCP does with it is, over the Checkpointer's comm, which must have the ranks of DCP's process
    group. Use one writer for all saves, and a process group of its own for `dcp.async_save`.

    Args:
        checkpointer: open for as long as the writer is used.
    """

    def __init__(self, checkpointer: Checkpointer):
        self._checkpointer: Checkpointer | None = checkpointer
        self._timeout_s = checkpointer.timeout_s
        self._id: str | os.PathLike[str] | int | None = None
        self._is_coordinator = False
        self._staged: weakref.WeakValueDictionary[int, Staged] = weakref.WeakValueDictionary()
        self._blob_nbytes = 0
        self._written: _Written | None = None
        self._door: Door | None = None

    def prepare(self, state_dict: Mapping[str, Any]) -> None:
        """Make the slots for state dicts like this one, so that the first `dcp.async_save` copies once, too.

        Collective over the Checkpointer's comm.

        Raises:
            MemoryTooSmall: they do not fit into the node's memory.
        """
        self._here.prepare(room_for(chunks_of(state_dict), self._blob_nbytes))

    # StorageWriter

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether an id names a step."""
        try:
            return step_of(checkpoint_id) >= 0
        except MlflashError:
            return False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a save."""
        if checkpoint_id is not None:
            step_of(checkpoint_id)
        self._id = checkpoint_id

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learn whether this rank is the one that ends the save, and let go of an earlier one that has not ended."""
        self._is_coordinator = is_coordinator
        self._go_on(None, None)

    def storage_meta(self) -> StorageMeta:
        """Name the checkpoint."""
        return StorageMeta(checkpoint_id=None if self._id is None else str(self._id))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Leave the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Leave the plans as they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Copy what the plan says, where that is not done yet; rank 0 goes on in `finish`."""
        step = None if self._id is None else step_of(self._id)
        try:
            staged = tuple(self._staged.values())
            self._written = _collect(step, plan, planner, staged, self._checkpointer is None)
        except Exception as error:
            self._go_on(_Written(step, [], {}, []), SaveFailed(f"what is saved could not be had: {error!r}"))
            raise
        finally:
            self._id = None  # the next save may come without one, and then without a call of reset
        if not self._is_coordinator:
            self._go_on(self._written, None)
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(item.index, _nbytes(item), None) for item in plan.items])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit.

        Raises:
            SaveFailed, DeadlineExceeded: it was not committed.
        """
        assert self._written is not None
        raw = io.BytesIO()
        torch.save(metadata.planner_data, raw)
        written, self._written = self._written, None
        self._go_on(written, raw.getvalue(), wait=True)

    # AsyncStager

    _synchronize_after_execute = False

    @property
    def should_synchronize_after_execute(self) -> bool:
        """No: what is staged is staged when `stage` returns."""
        return False

    def stage(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """Copy a state dict into a slot; it may be changed when this returns.

        Raises:
            StateError: a tensor cannot be saved.
        """
        staged = Staged(self._here, state_dict, self._blob_nbytes)
        self._staged[staged.token] = staged
        return staged.state_dict()

    def synchronize_staging(self) -> None:
        """Nothing is left to wait for."""

    def close(self) -> None:
        """Forget what was staged for saves that failed."""
        for staged in tuple(self._staged.values()):
            staged.give_up()

    # Here, and in the child of a process

    @property
    def _here(self) -> Checkpointer:
        assert self._checkpointer is not None, "a checkpoint process has no Checkpointer"
        return self._checkpointer

    def __getstate__(self) -> dict[str, Any]:
        if self._door is None:
            self._door = open_door(lambda asked: self._save(*asked))
        return {**self.__dict__, "_checkpointer": None, "_staged": {}, "_written": None}

    def _go_on(self, written: _Written | None, more: bytes | MlflashError | None, wait: bool = False) -> None:
        if self._checkpointer is not None:
            self._save(written, more, wait)
        else:
            assert self._door is not None
            self._door.ask((written, more, wait), 2 * self._timeout_s)

    def _save(self, written: _Written | None, more: bytes | MlflashError | None, wait: bool) -> None:
        """Post the save, and wait for its commit; without one, let the last one fail if it has not ended."""
        if written is None:
            self._here.withdraw()
            return
        last = self._here.last_step
        step = written.step if written.step is not None else 0 if last is None else last + 1
        if isinstance(more, MlflashError):
            snapshot = self._here.save_again(step, more)
        else:
            snapshot = self._post(step, written, self._staged.get(written.token), more)
        for token, staged in tuple(self._staged.items()):
            if token <= written.token:  # earlier ones have failed, or they had been here before
                staged.give_up()
        if wait:
            snapshot.wait()

    def _post(self, step: int, written: _Written, staged: Staged | None, planner_data: bytes | None) -> Snapshot:
        index, blob = pack(written.keys, written.parts, planner_data)
        self._blob_nbytes = max(self._blob_nbytes, len(blob))
        if staged is None:
            live = flat_of(written.chunks, index, blob)
            ahead = self._here.stage_ahead(live)
            # Clones, as this rank may be told of a failure, and train on, before room is made and they are copied.
            return self._here.save_again(step, ahead or flat_of(map(cloned, written.chunks), index, blob))
        if staged.ahead is not None and staged.ahead.write(0, index) and staged.ahead.write(1, blob):
            return self._here.save_again(step, staged.ahead)
        chunks = [staged.clone(key) for key in written.keys]
        staged.give_up()
        return self._here.save_again(step, flat_of(chunks, index, blob))


def _collect(
    step: int | None, plan: SavePlan, planner: SavePlanner, staged: Collection[Staged], child: bool
) -> _Written:
    """Look what the plan says; what is staged already is not touched.

    Raises:
        StateError: a tensor is not what was staged, and this is a child, which does not have it.
    """
    written = _Written(step, [], {}, [])
    found: list[tuple[Key, torch.Tensor, WriteItem]] = []
    for item in plan.items:
        data = planner.resolve_data(item)
        if item.type is WriteItemType.BYTE_IO:
            written.parts[item.index.fqn] = bytes(data.getbuffer())
        else:
            found.append((key_of(item), data.detach(), item))
    written.keys = [key for key, _, _ in found]
    if child:
        tokens = {key: in_child(key, tensor) for key, tensor, _ in found}
        changed = [name for (name, _), token in tokens.items() if token is None]
        if changed:
            raise StateError("the planner changes tensors, which a checkpoint process does not have: use THREAD",
                             tensor=changed[0])  # fmt: skip
        written.token = next((token for token in tokens.values() if token is not None), 0)
        return written
    for one in staged:
        if found and all(one.has(key, tensor) for key, tensor, _ in found):
            written.token = one.token
            return written
    for key, tensor, item in found:
        assert item.tensor_data is not None
        theirs = [one for one in staged if one.touches(tensor)]
        value = tensor.clone() if theirs else tensor  # else the copy would go where it comes from
        for one in theirs:
            one.check()
        written.chunks.append(Chunk(key, value, tuple(item.tensor_data.size)))
    return written


def _nbytes(item: WriteItem) -> int:
    return item.tensor_storage_size() or 0
