"""Lightning's own checkpoints: Lightning writes them to memory, and they are moved to their place in the background.

The files are Lightning's, so it resumes from them without mlflash. A checkpoint gets its name when all files of all
ranks have arrived, and only then links to it are made. If a ModelCheckpoint deletes something meanwhile, that waits
until then.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from mlflash import Checkpointer
from mlflash.errors import ConfigError

from ..replacing import replaced


class OwnFiles:
    """Moves Lightning's own checkpoints of one fit. Collective over all ranks. Close it at the end.

    Args:
        trainer: Lightning's Trainer.
        checkpointer: the Checkpointer of the fit.

    Raises:
        ConfigError: a plugin also writes files in the background.
    """

    def __init__(self, trainer: Any, checkpointer: Checkpointer):
        strategy = trainer.strategy
        if any("Async" in kind.__name__ for kind in type(strategy.checkpoint_io).__mro__):
            raise ConfigError("a plugin already writes checkpoints in the background: leave out in_background, or the "
                              "plugin", found=type(strategy.checkpoint_io).__name__)  # fmt: skip
        self._strategy, self._files = strategy, checkpointer.adapting.own_files()
        self._save: Callable[..., None] = strategy.save_checkpoint
        self._remove: Callable[[Any], None] = strategy.remove_checkpoint
        self._undo = replaced(strategy, save_checkpoint=self.save, remove_checkpoint=self.remove)
        for callback in trainer.checkpoint_callbacks:
            if hasattr(callback, "file_exists"):  # a ModelCheckpoint
                exists = functools.partial(self.exists, callback.file_exists)
                link = functools.partial(self.link, callback._link_checkpoint)
                self._undo.callback(replaced(callback, file_exists=exists, _link_checkpoint=link).close)

    def save(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        """Let Lightning write a checkpoint to memory, or to its place if some rank has no room. Collective.

        Raises:
            SaveFailed: only with ``strict``, on all ranks: the checkpoint before could not be moved.
        """
        target = os.fspath(self._strategy.broadcast(filepath))
        if "://" in target or storage_options is not None or not self._files.begin(target):
            self._save(checkpoint, filepath, storage_options)
            return
        if self._writes_on_all_ranks():
            with self._files.directory(target) as path, replaced(self._strategy, broadcast=lambda what, *args: what):
                self._save(checkpoint, path)
        elif self._strategy.is_global_zero:
            with self._files.directory(target, alone=True) as path:
                self._save(checkpoint, path / path.name)
        else:
            self._save(checkpoint, filepath)
        self._files.expect(target)

    def remove(self, filepath: Any) -> None:
        """Delete a checkpoint once all checkpoints that were written after it have arrived. Collective."""
        self._files.remove_when_moved(filepath, functools.partial(self._remove, filepath))

    def link(self, link: Callable[..., None], trainer: Any, filepath: str, linkpath: str) -> None:
        """Link to a checkpoint once it has arrived. Collective."""
        if not self._files.expects(filepath):
            link(trainer, filepath, linkpath)
        elif trainer.is_global_zero:
            self._files.link(linkpath, filepath)

    def exists(self, exists: Callable[[Any, Any], bool], filepath: Any, trainer: Any) -> bool:
        """Whether a file would exist if all writes and deletions were done already. Collective."""
        return self._files.would_be_there(filepath, lambda: exists(filepath, trainer))

    def finish(self) -> None:
        """Wait until all checkpoints are on disk. Not collective."""
        self._files.finish()

    def close(self) -> None:
        """Close without waiting. The rest is still moved in the background. Not collective."""
        self._undo.close()
        self._files.close()

    def _writes_on_all_ranks(self) -> bool:
        """Whether a checkpoint is a directory with files of each rank."""
        strategy = self._strategy
        return bool(getattr(strategy, "_save_distributed_checkpoint", False)) or (
            getattr(strategy, "_state_dict_type", "") == "sharded"
        )
