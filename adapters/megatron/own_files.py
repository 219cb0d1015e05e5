"""Megatron's own checkpoints: it writes them to memory, and they are moved to ``--save`` behind training.

They are the files that Megatron writes, so that it loads them without mlflash; a checkpoint has its name when all files
of all ranks are there, and ``latest_checkpointed_iteration.txt`` names it after that.
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
    """Those of one training. Collective over all ranks; close it.

    Args:
        arguments: Megatron's.
        checkpointer: that of the training.
        most: how many of them stay; 0: all.

    Raises:
        ConfigError: Megatron has no directory, writes behind training itself, or deletes checkpoints itself.
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
        """Have Megatron write a checkpoint to memory; where some rank has no room there, to its directory. Collective.

        Args:
            iteration: of the training.
            save: calls Megatron's ``save_checkpoint``.

        Raises:
            SaveFailed: with ``strict``, on all ranks, where the one before was not moved.
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
        """Wait until all is in its directory. Not collective."""
        self._files.finish()

    def close(self) -> None:
        """Let the rest be moved; nobody waits for it. Not collective."""
        self._files.close()

    def _delete(self) -> None:
        """Delete the oldest of those that this training has written."""
        while len(self._written) > self._most:
            oldest = self._written.popleft()
            if self._is_first:
                shutil.rmtree(oldest, ignore_errors=True)
