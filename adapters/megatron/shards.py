"""Megatron's `dist_checkpointing.save` and `load`, to and from slots: ShardedTensors, in any layout.

Megatron translates its ShardedTensors to and from those of PyTorch, and PyTorch plans. The writer and reader of
`mlflash.adapters.dcp` write and read what is planned. From Core 0.17 on Megatron calls only strategies of its own
class, so these are subclasses of it in every version.

`dist_checkpointing` also needs a directory with the files that mark a checkpoint, and with what all ranks have in
common. That is saved in a slot, too. For a load, each rank makes the directory again.
"""

from __future__ import annotations

import concurrent.futures
import inspect
import io
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Set
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies import torch as stock
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata

from mlflash import Checkpointer
from mlflash.errors import StructureMismatch, Unrestorable

from ..dcp import MemoryReader, MemoryWriter
from ..ids import step_of
from ..replacing import replaced
from . import padding
from .request import nothing_to_do, request

_BACKEND, _VERSION = "torch_dist", 1
_KEPT = 4  # the most directories to keep; never more saves run at once
_NOTED = "mcore_data"
_COMMON = "common_state/shard_0_1"  # what ranks have in common; its name among the objects of a checkpoint
_COMMON_FILE = "common.pt"
_WEIGHTS = ("param", "fp32_param")  # parts of the names of what Megatron's optimizers hold
_MOMENTS = {"exp_avg", "exp_avg_sq", "momentum_buffer"}
_AS_FILE = "common_strategy" in inspect.signature(dist_checkpointing.save).parameters  # up to Core 0.18


class SaveShards(stock.TorchDistSaveShardedStrategy):
    """Saves sharded state dicts in the memory of the nodes, protected and committed like any checkpoint.

    You can make it on each rank by itself. The calls of `dist_checkpointing.save` with it are collective over all ranks
    of torch.distributed, which must be those of the Checkpointer's comm.

    Args:
        checkpointer: must stay open while you use this.
        enabled: False: nothing is saved and every save succeeds, as if the Checkpointer were off.

    Attributes:
        owned: gives more tensors that change only in a step, after the optimizer's own, see `AdapterAPI.save_or_warn`.
        committed: is called with the step, on a thread, when a save was committed.

    Example:
        save = SaveShards(ckpt)
        request = dist_checkpointing.save(sharded_state, save.directory(step), save, async_sharded_save=True)
        request.execute_sync()  # or give it to Megatron's queue
    """

    def __init__(self, checkpointer: Checkpointer, enabled: bool = True):
        super().__init__(_BACKEND, _VERSION)
        padding.leave_out()
        self._writer, self._timeout_s = MemoryWriter(checkpointer, enabled), checkpointer.timeout_s
        self._adapting = checkpointer.adapting
        self._planning: Any = None
        self._before: concurrent.futures.Future[Any] | None = None
        self._directories = _Directories()
        self.owned: Callable[[], Iterable[Any]] = lambda: ()
        self.committed: Callable[[int], None] = lambda step: None

    def directory(self, step: int) -> str:
        """Make the directory that `dist_checkpointing.save` needs, in this machine's temporary files.

        Not collective. Its name contains the step, and you need not keep it. You may use any other directory whose name
        ends with the step instead, because the shards are not written there.
        """
        return self._directories.make(step)

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        """Save, and wait for the commit. Collective."""
        self.async_save(sharded_state_dict, checkpoint_dir).execute_sync()

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any, async_strategy: str = "mcore") -> Any:
        """Copy a state dict into a slot. It is protected and committed in the background. Collective.

        Tensors of torch optimizers that have made a step in this process are copied while training goes on, until one
        of these optimizers steps. Megatron's optimizers contain such optimizers.

        Returns:
            A request that any queue of Megatron or NVRx takes. Its finalizing function waits for the commit.
        """
        if not self._writer.enabled:
            return nothing_to_do()
        if self._before is not None:  # both would plan over one group, in another order on each rank
            concurrent.futures.wait([self._before], 2 * self._timeout_s)
        if self._planning is None:
            self._planning = dist.new_group(backend="gloo")  # a thread plans while training goes on
        renamed, _, _ = stock._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        state = stock.mcore_to_pyt_state_dict(renamed, False)
        if _AS_FILE and dist.get_rank() == 0:  # rank 0 has just written this file
            state[_COMMON] = io.BytesIO(Path(checkpoint_dir, _COMMON_FILE).read_bytes())
        self._writer.until, self._writer.owned = self._adapting.stepped_optimizers(), self.owned
        future = dcp.async_save(state, checkpoint_id=os.fspath(checkpoint_dir), storage_writer=self._writer,
                                planner=_planner(), process_group=self._planning)  # fmt: skip
        self._before, step = future, step_of(checkpoint_dir)
        future.add_done_callback(lambda ended: None if ended.exception() else self.committed(step))
        return request(future.add_done_callback, future.result, self._timeout_s)


class LoadShards(stock.TorchDistLoadShardedStrategy):
    """Loads sharded state dicts from the memory of the nodes, in whatever layout they were saved.

    You can make it on each rank by itself. The calls of `dist_checkpointing.load` with it are collective over all ranks
    of torch.distributed, which must be those of the Checkpointer's comm.

    Args:
        checkpointer: must stay open while you use this.
        source: another directory that checkpoints were drained to. It is only read, and memory is ignored.
        enabled: False: there is no checkpoint, as if the Checkpointer were off.

    Example:
        load = LoadShards(ckpt)
        if (directory := load.directory()) is not None:
            state = dist_checkpointing.load(sharded_state, directory, load)
    """

    def __init__(self, checkpointer: Checkpointer, source: str | os.PathLike[str] | None = None, enabled: bool = True):
        super().__init__()
        self._reader, self._adapting = _Reader(checkpointer, source, enabled), checkpointer.adapting
        self._directories = _Directories()

    def directory(self, step: int | None = None, instead: object = None) -> str | None:
        """Make the directory that `dist_checkpointing.load` needs from a checkpoint, in this machine's temporary files.

        Collective over the Checkpointer's comm.

        Args:
            step: step of the checkpoint. None: the newest.
            instead: what training can start from otherwise, such as the path of a checkpoint of Megatron; the same on
                all ranks. If you give it and no checkpoint can be loaded, the call logs a warning and gives None.

        Returns:
            The path, which ends with the step. None if there is no checkpoint.

        Raises:
            StepNotFound: there is no such step.
            StructureMismatch: the checkpoint was not saved through `SaveShards`.
            Unrestorable: there are checkpoints, but none can be loaded, and you gave nothing as ``instead``.
        """
        try:
            found = self._reader.bytes_of(_COMMON, step)
        except Unrestorable as error:  # the same on all ranks
            self._adapting.go_on_instead(error, instead)
            return None
        if found is None:
            return None
        step, content = found

        def write() -> str:
            path = self._directories.make(step)
            if _AS_FILE:
                Path(path, _COMMON_FILE).write_bytes(content)
            else:
                common = {_COMMON: io.BytesIO(content)}
                dcp.save(common, storage_writer=FileSystemWriter(path), planner=_planner(), no_dist=True)
            save_config(CheckpointingConfig(_BACKEND, _VERSION), path)
            return path

        return self._adapting.load_together(step, write, anew=True)

    def common(self, directory: str) -> dict[str, Any]:
        """Load the values that are not tensors and are the same on all ranks, from a directory of `directory`.

        Collective over the Checkpointer's comm.
        """
        return self._adapting.load_together(
            step_of(directory), lambda: dict(dist_checkpointing.load_common_state_dict(directory)), anew=True
        )

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        """Load what `dist_checkpointing.load` asks for. Collective.

        Raises:
            StepNotFound: there is no such step.
            CheckpointException: a tensor is missing or has another global shape, or you ask for weights of the
                optimizer and not for the moments that were saved with them.
        """
        return self._reading(super().load, sharded_state_dict, checkpoint_dir, *args, **kwargs)

    def load_tensors_metadata(self, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        return self._reading(super().load_tensors_metadata, checkpoint_dir, *args, **kwargs)

    def load_sharded_metadata(self, checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
        found = self._reading(super().load_sharded_metadata, checkpoint_dir, *args, **kwargs)
        return {key: value for key, value in found.items() if key != _COMMON}

    def _reading(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def reader(checkpoint_dir: Any, *args: Any, **kwargs: Any) -> MemoryReader:
            self._reader.reset(os.fspath(checkpoint_dir))
            return self._reader

        with replaced(stock, _get_filesystem_reader=reader):
            return work(*args, **kwargs)


def _planner() -> Any:
    return _Planner(flatten_state_dict=False)


class _Planner(stock.MCoreSavePlanner):
    """Puts what Core up to 0.15 notes about its tensors into the planner's data, which is saved."""

    def create_global_plan(self, all_plans: Any) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        if hasattr(metadata, _NOTED):
            metadata.planner_data = {**(metadata.planner_data or {}), _NOTED: getattr(metadata, _NOTED)}
        return plans, metadata


class _Reader(MemoryReader):
    """Gives Core the notes back that `_Planner` saved, and refuses to load an optimizer's weights alone."""

    def read_metadata(self) -> Metadata:
        metadata = super().read_metadata()
        if _NOTED in (metadata.planner_data or {}):
            setattr(metadata, _NOTED, metadata.planner_data.pop(_NOTED))
        return metadata

    def _check(self, wanted: Set[str], present: Set[str]) -> None:
        for name in sorted(present - wanted):
            parts = name.split(".")
            for weights in _WEIGHTS if _MOMENTS & {*parts} else ():
                if (alone := ".".join(weights if part in _MOMENTS else part for part in parts)) in wanted:
                    raise StructureMismatch(
                        "the optimizer's weights would be loaded without its moments: make the state to load into with "
                        "sharded_state_dict(..., is_loading=True)", tensor=name, found=alone,
                    )  # fmt: skip


class _Directories:
    """Directories of the newest steps in this machine's temporary files, deleted with this object or at exit."""

    def __init__(self) -> None:
        self._root: str | None = None
        self._paths: list[str] = []

    def make(self, step: int) -> str:
        if self._root is None:
            self._root = tempfile.mkdtemp(prefix="mlflash-megatron-")
            weakref.finalize(self, _delete, self._root, os.getpid())
        path = os.path.join(self._root, f"iter_{step:07d}")
        self._paths = [kept for kept in self._paths if kept != path]
        for old in (path, *self._paths[: -_KEPT + 1]):
            shutil.rmtree(old, ignore_errors=True)
        self._paths = [*self._paths[-_KEPT + 1 :], path]
        os.mkdir(path)
        return path


def _delete(root: str, maker: int) -> None:
    if os.getpid() == maker:  # a forked process also ends, and must not delete it
        shutil.rmtree(root, ignore_errors=True)
