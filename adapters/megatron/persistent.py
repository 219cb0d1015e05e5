"""Megatron's own checkpoints on disk, from which a training can also start."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mlflash import Checkpointer
from mlflash.checkpointer import process_end

log = logging.getLogger("mlflash")

TRACKER = "latest_checkpointed_iteration.txt"


def arguments() -> Any:
    """Give Megatron's arguments. They are empty in a training loop that does not set them."""
    training = sys.modules.get("megatron.training")
    try:
        return argparse.Namespace() if training is None else training.get_args()
    except AssertionError:  # Megatron's way to say that nobody has set them
        return argparse.Namespace()


def newest(given: Any, load_arg: str) -> tuple[int, str]:
    """Find the newest iteration that Megatron itself saved, and the argument that names its directory. Not collective.

    The argument is ``load_arg``, or "save", because Megatron writes there while mlflash is off. The iteration is 0 if
    there is none.
    """
    found = {which: iteration_in(getattr(given, which, None)) for which in (load_arg, "save")}
    which = max(found, key=found.__getitem__)  # if equally new, the one that was asked for
    return found[which], which


def iteration_in(directory: Any) -> int:
    """Find the newest iteration that Megatron itself saved in a directory. 0: none. Not collective."""
    try:
        text = "" if directory is None else Path(directory, TRACKER).read_text().strip()
    except OSError:
        return 0
    return int(text) if text.isdecimal() else 0


def load(model: Sequence[Any], optimizer: Any, opt_param_scheduler: Any, which: str, strict: bool) -> int:
    """Let Megatron load its own checkpoint. Collective over all ranks."""
    directory = getattr(arguments(), which, None)
    if directory is None:
        return 0
    from megatron.training.checkpointing import load_checkpoint as of_megatron

    log.info("loading Megatron's own checkpoint from %s", directory)
    found = of_megatron(model, optimizer, opt_param_scheduler, which, strict)
    return int(found[0] if isinstance(found, tuple) else found)


def save(iteration: int, model: Sequence[Any], optimizer: Any, opt_param_scheduler: Any) -> None:
    """Let Megatron save, if its arguments are set and name a directory. Collective over all ranks."""
    given = arguments()
    if getattr(given, "save", None) is None:
        return
    from megatron.training.checkpointing import save_checkpoint as of_megatron

    operations = getattr(given, "num_floating_point_operations_so_far", 0)
    of_megatron(iteration, model, optimizer, opt_param_scheduler, operations)


class MemoryOnly:
    """What one training has saved in memory. If the process ends without an error, rank 0 says what is nowhere else.

    Megatron and Megatron Bridge save no persistent checkpoint where they exit, if a local one was due then.

    Args:
        checkpointer: saves it, and may drain it.
    """

    def __init__(self, checkpointer: Checkpointer):
        self._adapting = checkpointer.adapting
        self._iteration, self._directory, self._is_first = 0, "", True
        process_end.add(self, MemoryOnly.end, lambda parent: None)

    def saved(self, iteration: int, directory: str | os.PathLike[str] | None) -> None:
        """Note an iteration that was committed, and Megatron's directory of persistent checkpoints. Not collective."""
        self._iteration, self._directory = iteration, "" if directory is None else os.fspath(directory)
        self._is_first = not dist.is_initialized() or dist.get_rank() == 0

    def end(self, state: str = "ended") -> None:
        """Log a warning if the newest iteration is in memory only. Not collective. Nothing is logged after that.

        Args:
            state: "failed" if an exception ends the training. Then nothing is logged, because it will continue.
        """
        process_end.discard(self)
        iteration, self._iteration = self._iteration, 0
        if state != "ended" or not self._is_first:
            return
        newest = max(iteration_in(self._directory or None), self._adapting.newest_drained or 0)
        if newest < iteration:
            log.warning(
                "training has ended, and iteration %d is in memory only: the newest on disk is %s. It is lost when the "
                "nodes are released. To copy it to a directory before that, run: mlflash scavenge DIRECTORY",
                iteration, newest or "none",
            )  # fmt: skip
