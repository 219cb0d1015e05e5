"""A `StorageWriter` that writes what DCP plans to the memory of the nodes, and commits it.

    dcp.save                  copy what the plan names into a slot, then protect and commit it
    dcp.async_save, THREAD    `stage` copies into the slot at once; a thread plans later, and finds it copied already
    dcp.async_save, PROCESS   the same, but a child process plans with meta tensors, and asks this one for the rest

Ranks do not wait for each other before `finish`, in which rank 0 waits for the commit. `dcp.save` tells all ranks what
failed before that. By then other ranks may have posted the save, and this one has not. In that case it posts a failure
with its next collective call (see `AdapterAPI.begin`), so that the queues of all ranks match.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from mlflash import Checkpointer
from mlflash.checkpointer.off import turned_off
from mlflash.errors import MlflashError, SaveFailed, StateError
from mlflash.save.save_queue import ReservedSave
from mlflash.save.stage import StagedState
from mlflash.state.leaves import Flat
from mlflash.storage.dcp_files import pickled
from mlflash.storage.dcp_plans import Key

from ..ids import names_a_step, step_of
from .process import Door, open_door
from .staged import Chunk, Layouts, Staged, StagedDict, cloned, flat_of, in_child, key_of, pack

_KNOWN = {"torch", "megatron", "mlflash", "builtins", "abc"}
"""Packages whose planners read no tensor."""


@dataclasses.dataclass
class _Written:
    """What one rank's plan names."""

    keys: list[Key]  # of the tensors
    parts: dict[str, bytes]  # values as bytes, by name
    chunks: list[Chunk]  # the tensors; empty if they were staged and have not changed
    token: int = 0  # of the staged state dict; 0: none


@dataclasses.dataclass
class _Begin:
    """The request to begin a save, sent to the process that has the Checkpointer."""

    step: int | None  # None: the next one
    thread: int  # the thread of that process that works for the save


@dataclasses.dataclass
class _Post:
    """The request to post a save when a rank has written: with the planner's data, or with the error."""

    written: _Written
    more: bytes | MlflashError | None = None
    wait: bool = False


class _Running(threading.local):
    """The save that this thread works on. Saves of other threads may overlap it."""

    id: str | os.PathLike[str] | int | None = None  # the checkpoint's id
    is_coordinator = False  # whether this rank ends the save
    written: _Written | None = None  # what this rank wrote
    begun: ReservedSave | None = None  # the save as the process of the Checkpointer knows it


class MemoryWriter(StorageWriter):
    """Saves what DCP plans in the memory of the nodes, protected and committed like any checkpoint of a Checkpointer.

    It is its own `AsyncStager`. The step comes from ``checkpoint_id`` (see `step_of`); without an id it is the next
    step. You may save the newest step again. The commit of the new content replaces the old.

    You can make a writer on each rank by itself. DCP's calls with it are collective over the Checkpointer's comm, which
    must have the ranks of DCP's process group. Use one writer for all saves, and give `dcp.async_save` a process group
    of its own.

    Args:
        checkpointer: must stay open while you use the writer.
        enabled: False: it writes nothing and every save succeeds, as if the Checkpointer were off.
        until: torch optimizers. `dcp.async_save` copies their tensors while training goes on, until one of them steps,
            see `Checkpointer.save`. Then planners must be torch's or Megatron's own. A string says why none is given.

    Attributes:
        enabled: whether it writes anything.
        until: you may change it between saves.
        owned: gives more tensors that change only in those steps, see `AdapterAPI.save_or_warn`.
    """

    def __init__(self, checkpointer: Checkpointer, enabled: bool = True, until: Sequence[Any] | str = ()):
        self._checkpointer: Checkpointer | None = checkpointer
        self.enabled = checkpointer.enabled and not turned_off(enabled)
        self.until = until
        self.owned: Callable[[], Iterable[Any]] = lambda: ()
        self._timeout_s = checkpointer.timeout_s
        self._running = _Running()
        self._sender = 0  # in a child: the thread of the parent, which waits for it
        self._staged: weakref.WeakValueDictionary[int, Staged] = weakref.WeakValueDictionary()
        self._room = (0, 0)  # the most that index and blob have taken so far
        self._layouts = Layouts()
        self._door: Door | None = None

    def prepare(self, state_dict: Mapping[str, Any]) -> None:
        """Make the slots for state dicts like this one, so that the first `dcp.async_save` also copies only once.

        Collective over the Checkpointer's comm.

        Raises:
            MemoryTooSmall: the slots do not fit into the node's memory.
        """
        if self.enabled:
            self._here.prepare(self._layouts.lay_out(state_dict, self._room).flat)

    # StorageWriter

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return names_a_step(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if self.enabled and checkpoint_id is not None:
            step_of(checkpoint_id)
        self._running.id = checkpoint_id

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._running.is_coordinator = is_coordinator

    def storage_meta(self) -> StorageMeta:
        """Name the checkpoint, and begin the save: DCP makes this call first, on all ranks."""
        if not self.enabled:
            return StorageMeta()
        name = self._running.id
        thread = threading.get_ident() if self._checkpointer is not None else self._sender
        self._ask(_Begin(None if name is None else step_of(name), thread))
        return StorageMeta(checkpoint_id=None if name is None else str(name))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Copy what the plan names, if it is not copied yet. The coordinator posts the save later, in `finish`."""
        running = self._running
        done: Future[list[WriteResult]] = Future()
        if not self.enabled:
            done.set_result([])
            return done
        try:
            staged = tuple(self._staged.values())
            running.written = _collect(plan, planner, staged, self._checkpointer is None)
        except Exception as error:
            failed = SaveFailed(f"this rank could not collect what its plan names: {error!r}")
            self._ask(_Post(_Written([], {}, []), failed))
            raise
        finally:
            running.id = None  # the next save may come without one, and then without a call of reset
        if not running.is_coordinator:
            self._ask(_Post(running.written))
        done.set_result([WriteResult(item.index, _nbytes(item), None) for item in plan.items])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Wait for the commit."""
        if not self.enabled:
            return
        written, self._running.written = self._running.written, None
        assert written is not None
        self._ask(_Post(written, pickled(metadata.planner_data), wait=True))

    # AsyncStager

    _synchronize_after_execute = False

    @property
    def should_synchronize_after_execute(self) -> bool:
        return False

    def stage(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """Copy a state dict into a slot. You may change the state dict when this returns."""
        if not self.enabled:  # a child process gets meta tensors, because torch would otherwise move the live ones
            return StagedDict(state_dict)
        self._here.adapting.end_reservations()
        laid = self._layouts.lay_out(state_dict, self._room)
        staged = Staged(self._here, state_dict, laid, self.until, self.owned)
        self._staged[staged.token] = staged
        return staged.state_dict()

    def synchronize_staging(self) -> None:
        """Return at once: staging is done."""

    def close(self) -> None:
        """Forget what was staged for saves that failed."""
        for staged in tuple(self._staged.values()):
            staged.give_up()

    # In the process of the Checkpointer, and in a child process

    @property
    def _here(self) -> Checkpointer:
        assert self._checkpointer is not None, "a checkpoint process has no Checkpointer"
        return self._checkpointer

    def __getstate__(self) -> dict[str, Any]:
        if self._door is None and self.enabled:
            self._door = open_door(self._answer)
        left = dict.fromkeys(("_checkpointer", "_running", "_layouts", "until", "owned"))
        return {**self.__dict__, **left, "_staged": {}, "_sender": threading.get_ident()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= {**state, "_running": _Running()}

    def _ask(self, question: _Begin | _Post) -> None:
        if self._checkpointer is not None:
            self._answer(question)
        else:
            assert self._door is not None
            self._door.ask(question, 2 * self._timeout_s)

    def _answer(self, question: _Begin | _Post) -> None:
        """Begin a save, or post it and, if asked, wait for its commit."""
        if isinstance(question, _Begin):
            step, last = question.step, self._here.last_step
            if step is None:
                step = 0 if last is None else last + 1
            threads = {thread.ident: thread for thread in threading.enumerate()}
            self._running.begun = self._here.adapting.begin(step, threads.get(question.thread, threading.Thread()))
            return
        begun, self._running.begun = self._running.begun, None
        assert begun is not None, "storage_meta comes first"
        written, staged = question.written, self._staged.get(question.written.token)
        if isinstance(question.more, MlflashError):
            snapshot = self._here.adapting.save_again(question.more, begun)
        elif written.token and staged is None:  # PyTorch mixes up the answers to two saves at once in one process
            gone = SaveFailed("the state dict of this save was released before it was written: wait for the future of "
                              "one dcp.async_save before the next one")  # fmt: skip
            snapshot = self._here.adapting.save_again(gone, begun)
        else:
            snapshot = self._here.adapting.save_again(self._leaves(written, staged, question.more), begun)
        if staged is not None:
            staged.give_up()
        if question.wait:
            snapshot.wait()

    def _leaves(self, written: _Written, staged: Staged | None, planner_data: bytes | None) -> Flat | StagedState:
        index, blob = pack(written.keys, written.parts, planner_data)
        self._room = (max(self._room[0], len(index)), max(self._room[1], len(blob)))
        if staged is None:
            live = flat_of(written.chunks, index, blob)
            ahead = self._here.adapting.stage_early(live)
            # Clones: this rank may hear of a failure and train on before there is room and the tensors are copied.
            return ahead or flat_of(map(cloned, written.chunks), index, blob)
        if staged.ahead is not None and staged.ahead.write(0, index) and staged.ahead.write(1, blob):
            return staged.ahead
        leaves = staged.leaves(written.keys, index, blob)
        staged.give_up()
        return leaves


def _collect(plan: SavePlan, planner: SavePlanner, staged: Collection[Staged], child: bool) -> _Written:
    """Collect what the plan names, without touching what is staged already."""
    lazy = [state for state in staged if state.is_lazy]
    if lazy and not _is_known(planner):
        for state in lazy:
            state.give_up()
        why = "this planner may read tensors while they are still being copied: leave out until="
        raise StateError(why, found=type(planner))
    written = _Written([], {}, [])
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
            why = ("a planner changes or renames tensors, or a stager other than this writer copied them. The "
                   "checkpoint process does not have such tensors: use THREAD, and leave out async_stager")  # fmt: skip
            raise StateError(why, tensor=changed[0])
        written.token = next((token for token in tokens.values() if token is not None), 0)
        return written
    for state in staged:
        if found and all(state.has(key, tensor) for key, tensor, _ in found):
            written.token = state.token
            return written
    for key, tensor, item in found:
        assert item.tensor_data is not None
        touched = [state for state in staged if state.touches(tensor)]
        for state in touched:
            state.finish()
        value = tensor.clone() if touched else tensor  # or source and destination of the copy could be the same
        for state in touched:
            state.check()
        written.chunks.append(Chunk(key, value, tuple(item.tensor_data.size)))
    return written


def _is_known(planner: SavePlanner) -> bool:
    return all(kind.__module__.split(".")[0] in _KNOWN for kind in type(planner).__mro__)


def _nbytes(item: WriteItem) -> int:
    return item.tensor_storage_size() or 0
