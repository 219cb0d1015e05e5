"""Paths for checkpoints in memory, for what Lightning does with a checkpoint other than train from it."""

from __future__ import annotations

import os
from typing import Any

from mlflash import Checkpointer
from mlflash.errors import ConfigError, StepNotFound

from .packages import modules
from .states import Whole

PREFIX = "mlflash:"


def step_of_path(checkpointer: Checkpointer, path: str) -> int:
    """Find the step that a path means. Collective over all ranks."""
    asked = path[len(PREFIX) :]
    if asked != "newest" and not asked.isdecimal():
        raise ConfigError("this is not a path of a checkpoint in memory", expected="mlflash:newest or mlflash:STEP",
                          found=path)  # fmt: skip
    if asked == "newest":
        newest = checkpointer.adapting.newest_step() if checkpointer.enabled else None
        if newest is None:
            raise StepNotFound("neither memory nor the directory has any checkpoint", expected=asked)
        return newest
    if int(asked) not in (steps := checkpointer.steps()):
        raise StepNotFound("neither memory nor the directory has this step", expected=asked, found=steps)
    return int(asked)


class MemoryIO:
    """Loads checkpoints from memory if a path begins with ``mlflash:``.

    Use it for ``trainer.test(ckpt_path="mlflash:newest")`` and the like. It passes all other paths to the CheckpointIO
    that it wraps. It works with strategies that hold the whole model on each rank, because only these use a
    CheckpointIO. Training does not need it: `MLFlashCallback` finds the newest checkpoint, and knows these paths.

    Args:
        wrapped: the CheckpointIO for all other paths. Default: Lightning's own.
        directory: where checkpoints were drained to. Default: none.
        enabled: False, or ``MLFLASH_DISABLE=1``: it finds no checkpoint in memory.
        settings: as those of a Checkpointer.
    """

    def __init__(self, wrapped: Any = None, directory: str | os.PathLike[str] | None = None, enabled: bool = True,
                 **settings: Any):  # fmt: skip
        super().__init__()
        self.wrapped = modules("plugins")[0].TorchCheckpointIO() if wrapped is None else wrapped
        self._directory, self._settings = directory, {**settings, "enabled": enabled}

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a checkpoint of Lightning to disk. Not collective.

        Raises:
            ConfigError: the path is one of memory. Lightning makes this call on rank 0 only, but in memory each rank
                must save its own part.
        """
        if str(path).startswith(PREFIX):
            raise ConfigError("only MLFlashCallback saves in memory, on all ranks: give a path on disk", found=path)
        self.wrapped.save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint. For one in memory this is collective over all ranks.

        Raises:
            StepNotFound: there is no checkpoint, or no such step.
        """
        if not str(path).startswith(PREFIX):
            return self.wrapped.load_checkpoint(path, *args, **kwargs)
        with Checkpointer(self._directory, **self._settings) as checkpointer:
            checkpoint, _ = Whole.load(checkpointer, step_of_path(checkpointer, str(path)))
        return checkpoint

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint from disk. Newer saves overwrite those in memory. Not collective."""
        if not str(path).startswith(PREFIX):
            self.wrapped.remove_checkpoint(path)

    def teardown(self) -> None:
        self.wrapped.teardown()
