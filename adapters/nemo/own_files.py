"""NeMo's own checkpoints: its ModelCheckpoint writes them to memory, and they are moved to disk in the background.

The files are NeMo's, with the context, so its AutoResume finds and loads them without mlflash. A checkpoint gets its
name when all files of all ranks have arrived, and only then ``-last`` links to it. So it needs no marker for unfinished
checkpoints. If a ModelCheckpoint deletes something meanwhile, that waits until then.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nemo.lightning.ckpt_utils import ckpt_to_dir
from nemo.lightning.pytorch.callbacks import ModelCheckpoint

from mlflash import Checkpointer
from mlflash.errors import ConfigError

from ..replacing import replaced


class OwnFiles:
    """Moves NeMo's own checkpoints of one fit with a `MegatronStrategy`. Collective over all ranks. Then close it.

    Args:
        trainer: NeMo's Trainer.
        checkpointer: the Checkpointer of the fit.

    Raises:
        ConfigError: NeMo itself writes in the background, or also writes moving averages (EMA).
    """

    def __init__(self, trainer: Any, checkpointer: Checkpointer):
        if trainer.strategy.async_save:
            raise ConfigError("NeMo already writes checkpoints in the background: leave out in_background, or give the "
                              "MegatronStrategy ckpt_async_save=False")  # fmt: skip
        callbacks = [one for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)]
        if any(one._ema_callback(trainer) is not None for one in callbacks):
            raise ConfigError("NeMo writes a second checkpoint, of moving averages (EMA), which in_background cannot "
                              "move: leave out in_background")  # fmt: skip
        self._strategy, self._files = trainer.strategy, checkpointer.adapting.own_files()
        self._undo = contextlib.ExitStack()
        names: dict[str, Callable[..., Any]] = {
            "_save_checkpoint": self.save, "_link_checkpoint": self.link, "file_exists": self.exists,
        }  # fmt: skip
        for callback in callbacks:
            ours = {name: functools.partial(do, callback, getattr(callback, name)) for name, do in names.items()}
            self._undo.enter_context(replaced(callback, _remove_checkpoint=self.remove, **ours))

    def save(self, callback: Any, save: Callable[..., None], trainer: Any, filepath: Any) -> None:
        """Let NeMo write a checkpoint to memory, or to its place if some rank has no room. Collective.

        Raises:
            SaveFailed: only with ``strict``, on all ranks: the checkpoint before could not be moved.
        """
        target = Path(ckpt_to_dir(filepath))
        if "://" in str(filepath) or not self._files.begin(os.fspath(target)):
            save(trainer, filepath)
            return
        state = callback.state_dict
        with self._files.directory(target) as path:

            def say_where() -> None:  # the checkpoint itself contains the path, too
                last = callback.future_last_model_path
                callback.future_last_model_path = last.replace(os.fspath(path), os.fspath(target))

            def state_dict() -> Any:
                say_where()
                return state()

            with replaced(callback, state_dict=state_dict):
                save(trainer, f"{path}{callback.FILE_EXTENSION}")
            say_where()  # if only weights are saved, nobody has called `state_dict`
        callback._last_checkpoint_saved = filepath
        self._files.expect(target)

    def remove(self, trainer: Any, filepath: Any) -> None:
        """Delete a checkpoint once all checkpoints that were written after it have arrived. Collective."""
        self._files.remove_when_moved(ckpt_to_dir(filepath), functools.partial(self._remove, filepath))

    def link(self, callback: Any, link: Callable[..., None], trainer: Any, filepath: Any, linkpath: Any) -> None:
        """Link to a checkpoint once it has arrived. For a link to another step, let NeMo write it. Collective."""
        to, path = Path(ckpt_to_dir(filepath)), Path(ckpt_to_dir(linkpath))
        if not self._files.expects(to) or str(path).replace("-last", "") != str(to):
            link(trainer, filepath, linkpath)
            return
        if trainer.is_global_zero:
            self._files.link(path, to)
        self._files.expect(path)

    def exists(self, callback: Any, exists: Callable[..., bool], filepath: Any, *args: Any) -> bool:
        """Whether a checkpoint would exist if all writes and deletions were done already. Collective."""
        return self._files.would_be_there(ckpt_to_dir(filepath), lambda: exists(filepath, *args))

    def end(self) -> None:
        """Wait until all checkpoints are in place. From now on NeMo itself writes there. Not collective."""
        self._undo.close()
        self._files.finish()

    def close(self) -> None:
        """Close without waiting. The rest is still moved in the background. Not collective."""
        self._undo.close()
        self._files.close()

    def _remove(self, filepath: Any) -> None:
        """Delete a checkpoint as NeMo does, but without ranks that wait for each other."""
        ModelCheckpoint.set_checkpoint_unfinished_marker(filepath)
        with contextlib.suppress(OSError):
            self._strategy.remove_checkpoint(filepath)
        ModelCheckpoint.remove_checkpoint_unfinished_marker(filepath)
