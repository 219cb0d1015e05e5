"""Checkpoints in memory by a path of their own, for what Lightning does with a checkpoint besides training."""

from __future__ import annotations

import os
from typing import Any

from mlflash import Checkpointer
from mlflash.errors import ConfigError, StepNotFound

from .packages import modules
from .states import load_whole

PREFIX = "mlflash:"


def step_of_path(checkpointer: Checkpointer, path: str) -> int:
    """Find the step that a path stands for. Collective over all ranks.

    Args:
        checkpointer: open.
        path: ``mlflash:newest``, or ``mlflash:`` and a step.

    Raises:
        StepNotFound: there is no such step.
        Unrestorable: checkpoints are there, and none of them can be loaded.
        ConfigError: this is no path.
    """
    asked = path[len(PREFIX) :]
    if asked != "newest" and not asked.isdecimal():
        raise ConfigError("this is not a path of a checkpoint in memory", expected="mlflash:newest or mlflash:STEP",
                          found=path)  # fmt: skip
    if asked == "newest":
        newest = checkpointer.adapting.newest_step()
        if newest is None:
            raise StepNotFound("neither memory nor the directory has any checkpoint", expected=asked)
        return newest
    if int(asked) not in (steps := checkpointer.steps()):
        raise StepNotFound("neither memory nor the directory has this step", expected=asked, found=steps)
    return int(asked)


class MemoryIO:
    """Loads checkpoints from memory where a path begins with ``mlflash:``.

    It is for ``trainer.test(ckpt_path="mlflash:newest")`` and the like. All other paths go to the CheckpointIO that is
    wrapped. Only strategies of which each rank holds the whole model ask it. Training itself does not need it:
    `MLFlashCallback` finds the newest checkpoint, and knows these paths.

    Args:
        wrapped: for all other paths. Default: Lightning's own.
        directory: where checkpoints were drained to. Default: none.
        enabled: False, or ``MLFLASH_DISABLE=1``: there is none in memory.
        settings: as those of a Checkpointer.
    """

    def __init__(self, wrapped: Any = None, directory: str | os.PathLike[str] | None = None, enabled: bool = True,
                 **settings: Any):  # fmt: skip
        super().__init__()
        self.wrapped = modules("plugins")[0].TorchCheckpointIO() if wrapped is None else wrapped
        self._directory, self._settings = directory, {**settings, "enabled": enabled}

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a checkpoint of Lightning's to disk. Not collective.

        Raises:
            ConfigError: the path is one of memory: Lightning asks rank 0 only, and each rank has to save its own.
        """
        if str(path).startswith(PREFIX):
            raise ConfigError("only MLFlashCallback saves in memory, on all ranks: give a path on disk", found=path)
        self.wrapped.save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint. Collective over all ranks, for those in memory.

        Raises:
            StepNotFound: there is none, or no such step.
        """
        if not str(path).startswith(PREFIX):
            return self.wrapped.load_checkpoint(path, *args, **kwargs)
        with Checkpointer(self._directory, **self._settings) as checkpointer:
            checkpoint, _ = load_whole(checkpointer, step_of_path(checkpointer, str(path)))
        return checkpoint

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint from disk; those in memory go by themselves. Not collective."""
        if not str(path).startswith(PREFIX):
            self.wrapped.remove_checkpoint(path)

    def teardown(self) -> None:
        """End what is wrapped."""
        self.wrapped.teardown()
