"""Say at the end of a training if its newest iteration is in memory only.

Megatron and Megatron Bridge save no persistent checkpoint where they exit, if a local one was due at that iteration.
"""

from __future__ import annotations

import logging
import os

import torch.distributed as dist

from mlflash import Checkpointer
from mlflash.checkpointer import unclosed

from . import persistent

log = logging.getLogger("mlflash")


class MemoryOnly:
    """What one training has saved in memory. If the process ends without an error, rank 0 says what is nowhere else.

    Args:
        checkpointer: saves it, and may drain it.
    """

    def __init__(self, checkpointer: Checkpointer):
        self._adapting = checkpointer.adapting
        self._iteration, self._directory, self._is_first = 0, "", True
        unclosed.add(self, MemoryOnly.end, lambda parent: None)

    def saved(self, iteration: int, directory: str | os.PathLike[str] | None) -> None:
        """Note an iteration that was committed, and Megatron's directory of persistent checkpoints. Not collective."""
        self._iteration, self._directory = iteration, "" if directory is None else os.fspath(directory)
        self._is_first = not dist.is_initialized() or dist.get_rank() == 0

    def end(self, state: str = "ended") -> None:
        """Log a warning if the newest iteration is in memory only. Not collective. Nothing is logged after that.

        Args:
            state: "failed" if an exception ends the training. Then nothing is logged, because it will continue.
        """
        unclosed.discard(self)
        iteration, self._iteration = self._iteration, 0
        if state != "ended" or not self._is_first:
            return
        newest = max(persistent.iteration_in(self._directory or None), self._adapting.newest_drained or 0)
        if newest < iteration:
            log.warning(
                "training has ended, and iteration %d is in memory only: the newest on disk is %s. It is lost when the "
                "nodes are released. To copy it to a directory before that, run: mlflash scavenge DIRECTORY",
                iteration, newest or "none",
            )  # fmt: skip
