"""Megatron's own checkpoints: Megatron writes them to memory, and they are moved to ``--save`` in the background.

The files are Megatron's, so Megatron loads them without mlflash. A checkpoint gets its name when all files of all ranks
have arrived. After that ``latest_checkpointed_iteration.txt`` names it.
"""

from __future__ import annotations

import collections
import os
import shutil
from collections.abc import Callable
from typing import Any

from mlflash import Checkpointer
from mlflash.errors import ConfigError

from ..replacing import replaced
from .persistent import TRACKER


class OwnFiles:
    """Moves Megatron's own checkpoints of one training. Collective over all ranks. Close it at the end.

    Args:
        arguments: Megatron's arguments.
        checkpointer: the training's Checkpointer.
        most: number of checkpoints to keep. 0: all.

    Raises:
        ConfigError: Megatron has no directory, or itself writes in the background or deletes checkpoints.
    """

    def __init__(self, arguments: Any, checkpointer: Checkpointer, most: int):
        if getattr(arguments, "save", None) is None:
            raise ConfigError("in_background=True moves Megatron's own checkpoints to --save: give --save a directory")
        for flag in ("async_save", "save_retain_interval"):
            if getattr(arguments, flag, None):
                raise ConfigError("Megatron already writes, or deletes, checkpoints in the background: leave out "
                                  f"in_background, or --{flag.replace('_', '-')}")  # fmt: skip
        self._directory, self._most = os.path.abspath(arguments.save), most
        self._files, self._is_first = checkpointer.adapting.own_files(), checkpointer.adapting.ranks.rank == 0
        self._written: collections.deque[str] = collections.deque()

    def save(self, iteration: int, save: Callable[[], None]) -> None:
        """Let Megatron write a checkpoint to memory, or to its directory if some rank has no room. Collective.

        Args:
            iteration: iteration of the training.
            save: calls Megatron's ``save_checkpoint``.

        Raises:
            SaveFailed: only with ``strict``, on all ranks: the checkpoint before could not be moved.
        """
        from megatron.training import checkpointing

        target = os.path.join(self._directory, f"iter_{iteration:07d}")
        if not self._files.begin(target):
            save()
            return
        name, tracker = checkpointing.get_checkpoint_name, checkpointing.get_checkpoint_tracker_filename
        with self._files.directory(target, {os.path.join(self._directory, TRACKER): str(iteration)}) as path:
            place = os.fspath(path.parent)

            def moved(directory: Any) -> Any:
                return place if os.path.abspath(directory) == self._directory else directory

            with replaced(
                checkpointing,
                get_checkpoint_name=lambda directory, *args, **more: name(moved(directory), *args, **more),
                get_checkpoint_tracker_filename=lambda directory: tracker(moved(directory)),
            ):
                save()
        self._written.append(target)
        if self._most:
            self._files.when_moved(self._delete)

    def finish(self) -> None:
        """Wait until all checkpoints are in the directory. Not collective."""
        self._files.finish()

    def close(self) -> None:
        """Close without waiting. The rest is still moved in the background. Not collective."""
        self._files.close()

    def _delete(self) -> None:
        """Delete the oldest checkpoints that this training wrote, beyond the number to keep."""
        while len(self._written) > self._most:
            oldest = self._written.popleft()
            if self._is_first:
                shutil.rmtree(oldest, ignore_errors=True)
