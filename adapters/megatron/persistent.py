"""Megatron's own checkpoints on disk, from which a training can also start."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
        said = "" if directory is None else Path(directory, TRACKER).read_text().strip()
    except OSError:
        return 0
    return int(said) if said.isdecimal() else 0


def load(model: Sequence[Any], optimizer: Any, opt_param_scheduler: Any, which: str, strict: bool) -> int:
    """Let Megatron load its own checkpoint. Collective over all ranks.

    Args:
        model: the list of models that Megatron makes.
        optimizer, opt_param_scheduler, strict: as those of Megatron's ``load_checkpoint``.
        which: the argument that names the directory.

    Returns:
        The iteration. 0 if Megatron's arguments are not set or name no directory.
    """
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
