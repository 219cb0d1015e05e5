"""The Trainer's own checkpoints: the Trainer writes them to memory, and they are moved to its folder in the background.

The files are the Trainer's, so it resumes from them without mlflash. A checkpoint gets its name when all files of all
ranks have arrived.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from transformers import trainer as module
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from mlflash import Checkpointer
from mlflash.errors import ConfigError

from ..replacing import replaced


class OwnFiles:
    """Moves the Trainer's own checkpoints of one training. Collective over all ranks. Close it at the end.

    Args:
        trainer: Hugging Face's Trainer.
        checkpointer: the training's Checkpointer.

    Raises:
        ConfigError: the Trainer uploads its checkpoints from where it wrote them.
    """

    def __init__(self, trainer: Any, checkpointer: Checkpointer):
        if trainer.args.push_to_hub:
            raise ConfigError("the Trainer cannot upload checkpoints that are moved in the background: leave out "
                              "in_background or push_to_hub")  # fmt: skip
        self._trainer = trainer
        self._files = checkpointer.adapting.own_files()
        self._directory: Callable[[Any], str] = trainer._get_output_dir
        self._save: Callable[[Any, Any], None] = trainer._save_checkpoint
        self._load_best: Callable[[], None] = trainer._load_best_model

    @property
    def methods(self) -> dict[str, Callable[..., Any]]:
        """Give the methods that replace the Trainer's own."""
        return {"_save_checkpoint": self.save, "_get_output_dir": self.output_dir, "_load_best_model": self.load_best}

    def save(self, model: Any, trial: Any) -> None:
        """Let the Trainer write its checkpoint to memory, or to disk if some rank has no room. Collective.

        Raises:
            SaveFailed: only with ``strict``, on all ranks: the checkpoint before could not be moved.
        """
        folder, state = self._directory(trial), self._trainer.state
        target = os.path.join(folder, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        if not self._files.begin(target):
            self._save(model, trial)
            return
        with self._files.directory(target) as path:
            written = os.fspath(path.parent)
            with replaced(self._trainer, _get_output_dir=lambda trial: written):
                self._save(model, trial)
            best = self._best(folder, written)
            if best != state.best_model_checkpoint:
                state.best_model_checkpoint = best
                if self._trainer.args.should_save:
                    state.save_to_json(os.path.join(path, TRAINER_STATE_NAME))
        if self._trainer.args.should_save:
            self._files.when_moved(lambda: self._rotate(folder))

    def _best(self, folder: str, written: str) -> str | None:
        """Find the best checkpoint. The Trainer saw no older one in the folder in memory where it just wrote."""
        state, best = self._trainer.state, self._trainer.state.best_model_checkpoint
        if best is not None and os.path.dirname(best) == written:
            return os.path.join(folder, os.path.basename(best))
        older = os.path.join(folder, f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}")
        is_kept = state.best_global_step and self._trainer.args.save_strategy.value != "no" and os.path.isdir(older)
        return older if is_kept else best

    def output_dir(self, trial: Any) -> str:
        """Wait until all checkpoints have arrived, and give their folder. Not collective."""
        self._files.finish()
        return self._directory(trial)

    def load_best(self) -> None:
        """Wait until all checkpoints have arrived, and load the best model. Not collective."""
        self._files.finish()
        self._load_best()

    def close(self) -> None:
        """Close without waiting. The rest is still moved in the background. Not collective."""
        self._files.close()

    def _rotate(self, folder: str) -> None:
        """Delete older checkpoints, as the Trainer does after each save, now that the newest has arrived."""
        if hasattr(module, "rotate_checkpoints"):
            module.rotate_checkpoints(output_dir=folder, save_total_limit=self._trainer.args.save_total_limit,
                                      best_model_checkpoint=self._trainer.state.best_model_checkpoint,
                                      use_mtime=True)  # fmt: skip
        else:  # older versions have a method
            self._trainer._rotate_checkpoints(use_mtime=True, output_dir=folder)
