"""The checkpoints of one training in the memory of the nodes: save what a `MegatronStrategy` gives, and load it."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.distributed.checkpoint.api import CheckpointException

from mlflash import Checkpointer, config
from mlflash.errors import MlflashError
from mlflash.memory.node_directory import clean
from mlflash.placement.topology import this_node

from ..ids import step_of
from ..lightning.loops import position
from ..megatron.shards import LoadShards, SaveShards

log = logging.getLogger("mlflash")

_ALIKE = "mlflash"
OF_RANK = "mlflash of this rank"
"""The key of what each rank saves for itself."""


class Memory:
    """The checkpoints of a training, under paths below a base, which is a name and not a directory.

    The first collective call opens the Checkpointer, because NeMo looks for a checkpoint before it sets up its process
    groups.

    Args:
        base: names the checkpoints. `path_of` gives the path of each.
        is_constant: whether the state has the same structure each time.
        is_dealt: whether ranks that hold the same tensors divide them among each other to save them.
        settings: as those of a Checkpointer.

    Attributes:
        settings: settings of the Checkpointer.
        place: the memory file system, and the job's name there.
        epoch_has_ended: whether the saved step is the last of an epoch. None: the step has not ended yet.
        context: files of the training's context by name, saved with each checkpoint. None: no context is saved.
    """

    def __init__(self, base: str | os.PathLike[str], is_constant: bool, is_dealt: bool, settings: dict[str, Any]):
        self.base = Path(os.path.abspath(base))
        named = settings.get("directory") or self.base
        given = {name: settings.get(name) for name in ("job", "memory")}
        known = config.from_environment(os.environ, named, **given)
        self.place = known.memory, known.job
        self.settings = {**settings, "job": known.job}
        self._is_constant, self._is_dealt = is_constant, is_dealt
        self._checkpointer: Checkpointer | None = None
        self._is_first = True
        self._save: Any = None
        self._strategy: Any = None
        self._load: LoadShards | None = None
        self._found: tuple[int, str] | None = None
        self._pending: tuple[int, Callable[[], None]] | None = None
        self.epoch_has_ended: bool | None = None
        self.context: dict[str, bytes] | None = None

    @property
    def checkpointer(self) -> Checkpointer:
        """The Checkpointer underneath. The first use opens it, which is collective over all ranks."""
        if self._checkpointer is None:
            self._checkpointer = Checkpointer(**self.settings)
        return self._checkpointer

    def path_of(self, step: int) -> Path:
        return self.base / f"step-{step:08d}"

    def holds(self, path: Any) -> bool:
        """Whether a path is below the base. ``/job-10`` is not below ``/job-1``."""
        return self.base in Path(path).parents

    # Saving

    def save(self, checkpoint: dict[str, Any], path: Any, content_metadata: Any) -> None:
        """Copy a checkpoint into a slot. It is protected and committed in the background.

        Collective over all ranks. If it fails, the next save or the end of training logs a warning.
        """
        self.wait()
        step = step_of(path)
        if self._save is None:
            self._save = SaveShards(self.checkpointer)
            self._strategy = self._save
            if self._is_dealt:
                self._strategy = FullyParallelSaveStrategyWrapper(self._save, None, self._is_constant)
        is_first, self._is_first = self._is_first, False
        checkpoint[_ALIKE] = {"ranks": dist.get_world_size(), "context": self.context if dist.get_rank() == 0 else None}
        at = position(checkpoint, self.epoch_has_ended)
        checkpoint[OF_RANK] = _sharded({**at, "tracker": get_cuda_rng_tracker().get_states()})
        request = dist_checkpointing.save(
            checkpoint, self._save.directory(step), self._strategy, validate_access_integrity=is_first,
            async_sharded_save=True, content_metadata=content_metadata,
            preprocess_common_before_consistancy_check=lambda common: {**common, _ALIKE: None},
        )  # fmt: skip
        self._pending = step, request.finalize_fns[0]  # Megatron's own only marks the directory, which is not kept

    def wait(self) -> None:
        """Wait for the running save, and log a warning if it failed. Not collective."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        step, finalize = pending
        try:
            finalize()
        except (MlflashError, CheckpointException) as error:
            if self.settings.get("strict"):
                raise
            log.warning("step %d was not saved: %s", step, error)

    # Loading

    def find(self, instead: Any = None) -> int | None:
        """Find the newest checkpoint of memory and the directory that can be loaded. Every byte of it is verified.

        Collective over all ranks.
        """
        path = self._loading().directory(instead=instead)
        if path is None:
            return None
        self._found = step_of(path), path
        return self._found[0]

    def directory(self, path: Any) -> str:
        """Make the directory that Megatron needs of a checkpoint. The first time this is collective over all ranks."""
        step = step_of(path)
        if self._found is None or self._found[0] != step:
            directory = self._loading().directory(step)
            assert directory is not None
            self._found = step, directory
        return self._found[1]

    def load(self, path: Any, wanted: dict[str, Any], strict: Any) -> dict[str, Any]:
        """Load the requested parts of a checkpoint, and what each rank saved for itself.

        Collective over all ranks.
        """
        directory = self.directory(path)
        alike = self._loading().common(directory)[_ALIKE]
        if alike["ranks"] == dist.get_world_size():
            wanted = {**wanted, OF_RANK: _sharded(None)}
        else:
            log.warning(
                "%s was saved by %d ranks, not by as many as now: random numbers begin anew", path, alike["ranks"]
            )
        strict = strict if isinstance(strict, StrictHandling) else StrictHandling.ASSUME_OK_UNEXPECTED
        loaded: dict[str, Any] = self.checkpointer.adapting.load_together(
            step_of(directory), lambda: dist_checkpointing.load(wanted, directory, self._loading(), strict=strict)
        )
        return loaded

    def context_of(self, path: Any) -> Path | None:
        """Write the files of a checkpoint's context. None if it has no context. Collective over all ranks."""
        directory = self.directory(path)
        files = self._loading().common(directory)[_ALIKE]["context"]
        if files is None:
            return None

        def write() -> Path:
            for name, content in files.items():
                file = Path(directory, "context", name)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
            return Path(directory, "context")

        return self.checkpointer.adapting.load_together(step_of(directory), write, anew=True)

    def _loading(self) -> LoadShards:
        if self._load is None:
            self._load = LoadShards(self.checkpointer)
        return self._load

    # Ending

    def close(self) -> None:
        """Wait for the running save, and free everything but the checkpoints. Collective over all ranks."""
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is None:
            return
        with contextlib.ExitStack() as stack:  # close it even if the running save failed
            stack.push(checkpointer.__exit__)
            self._save = self._strategy = self._load = self._found = None
            self.wait()

    def abandon(self) -> None:
        """Close without waiting for other ranks. The checkpoints stay. Not collective."""
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is not None:
            checkpointer.__exit__(RuntimeError, None, None)


def delete(memory: str, job: str) -> None:
    """Delete the checkpoints of a job from the memory of all nodes, when all its ranks have closed it.

    Collective over the ranks of torch.distributed. It logs a warning if something cannot be deleted.
    """
    node = this_node(memory)
    nodes: list[Any] = [node]
    rank = 0
    if dist.is_initialized():
        nodes, rank = [None] * dist.get_world_size(), dist.get_rank()
        dist.all_gather_object(nodes, node)  # no rank passes here before all have closed
    if nodes.index(node) != rank:
        return
    try:
        log.info("training has ended: deleted %d bytes of job %s from memory on %s", clean(memory, job), job, node.name)
    except MlflashError as error:
        log.warning("could not delete what job %s holds in memory on %s: %s", job, node.name, error)


def _sharded(value: Any) -> ShardedObject:
    return ShardedObject("mlflash.rank", value, (dist.get_world_size(),), (dist.get_rank(),))
