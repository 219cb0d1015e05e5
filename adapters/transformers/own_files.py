"""The Trainer's own checkpoints: it writes them to memory, and they are moved to its folder behind training.

They are the files that the Trainer writes, so that it resumes from them without mlflash; a checkpoint has its name when
all files of all ranks are there.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from transformers import trainer as module
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from mlflash import Checkpointer
from mlflash.errors import ConfigError, SaveFailed

from ..replacing import replaced

log = logging.getLogger("mlflash")


class OwnFiles:
    """Those of one training. Collective over all ranks; close it.

    Args:
        trainer: whose.
        checkpointer: that of the training.
        strict: raise what is a warning else.

    Raises:
        ConfigError: the Trainer uploads what it writes, from where it has written it.
    """

    def __init__(self, trainer: Any, checkpointer: Checkpointer, strict: bool):
        if trainer.args.push_to_hub:
            raise ConfigError("what is written in the background cannot be uploaded meanwhile: leave out in_background "
                              "or push_to_hub")  # fmt: skip
        self._trainer, self._ranks, self._strict = trainer, checkpointer.adapting.ranks, strict
        self._files = checkpointer.adapting.background_files()
        self._directory: Callable[[Any], str] = trainer._get_output_dir
        self._save: Callable[[Any, Any], None] = trainer._save_checkpoint
        self._load_best: Callable[[], None] = trainer._load_best_model
        self._unrotated: str | None = None  # where a checkpoint was written, and older ones not deleted yet

    @property
    def methods(self) -> dict[str, Callable[..., Any]]:
        """What to put in the place of the Trainer's own."""
        return {"_save_checkpoint": self.save, "_get_output_dir": self.output_dir, "_load_best_model": self.load_best}

    def save(self, model: Any, trial: Any) -> None:
        """Have the Trainer write its checkpoint to memory; where some rank has no room there, to disk. Collective.

        Raises:
            SaveFailed: with ``strict``, on all ranks, where the one before was not moved.
        """
        has_room, is_well = map(bool, self._ranks.agree([int(self._files.has_room()), int(self._is_well())]))
        if self._strict and not is_well:
            raise SaveFailed("a checkpoint of the Trainer was not moved to disk: the log says why")
        self._rotate()
        if not has_room:
            if self._ranks.rank == 0:
                log.warning("there is no room in memory, or nobody who moves files: the Trainer writes step %d to disk "
                            "itself", self._trainer.state.global_step)  # fmt: skip
            self._save(model, trial)
            return
        folder, state = self._directory(trial), self._trainer.state
        with self._files.directory(os.path.join(folder, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")) as path:
            written = os.fspath(path.parent)
            with replaced(self._trainer, _get_output_dir=lambda trial: written):
                self._save(model, trial)
            best = state.best_model_checkpoint
            if best is not None and os.path.dirname(best) == written:
                state.best_model_checkpoint = os.path.join(folder, os.path.basename(best))
                if self._trainer.args.should_save:
                    state.save_to_json(os.path.join(path, TRAINER_STATE_NAME))
        self._unrotated = folder

    def output_dir(self, trial: Any) -> str:
        """Where checkpoints are, when all of them are there. Not collective."""
        self.finish()
        return self._directory(trial)

    def load_best(self) -> None:
        """Load the best model, which may be on its way to disk still. Not collective."""
        self.finish()
        self._load_best()

    def finish(self) -> None:
        """Wait until all is on disk. Not collective."""
        self._files.wait()
        self._is_well()
        self._rotate()

    def close(self) -> None:
        """Let the rest be moved; nobody waits for it. Not collective."""
        self._files.close()

    def _is_well(self) -> bool:
        """Warn of what was not moved."""
        failed = self._files.failures()
        for target, why in failed.items():
            log.warning("%s was not moved to disk: %s", target, why)
        return not failed

    def _rotate(self) -> None:
        """Delete older checkpoints, as the Trainer does after each one, now that the newest is there."""
        folder, self._unrotated = self._unrotated, None
        if folder is None or not self._trainer.args.should_save:
            return
        if hasattr(module, "rotate_checkpoints"):
            module.rotate_checkpoints(output_dir=folder, save_total_limit=self._trainer.args.save_total_limit,
                                      best_model_checkpoint=self._trainer.state.best_model_checkpoint,
                                      use_mtime=True)  # fmt: skip
        else:  # older versions have a method
            self._trainer._rotate_checkpoints(use_mtime=True, output_dir=folder)
