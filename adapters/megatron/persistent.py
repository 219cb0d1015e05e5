"""Which checkpoint Megatron itself has written to disk: what a training goes on from besides those in memory."""

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
    """Megatron's; none where this is a training loop without them, though it may import Megatron's."""
    training = sys.modules.get("megatron.training")
    try:
        return argparse.Namespace() if training is None else training.get_args()
    except AssertionError:  # Megatron's way to say that nobody has set them
        return argparse.Namespace()


def newest(given: Any, load_arg: str) -> tuple[int, str]:
    """The newest iteration that Megatron itself has saved, and the argument that names its directory. Not collective.

    That is ``load_arg``, or "save": while mlflash was off Megatron wrote there. 0: there is none.
    """
    found = {which: iteration_in(getattr(given, which, None)) for which in (load_arg, "save")}
    which = max(found, key=found.__getitem__)  # of equally new ones that which was asked for
    return found[which], which


def iteration_in(directory: Any) -> int:
    """The newest iteration that Megatron itself has saved in a directory; 0: none. Not collective."""
    try:
        said = "" if directory is None else Path(directory, TRACKER).read_text().strip()
    except OSError:
        return 0
    return int(said) if said.isdecimal() else 0


def load(model: Sequence[Any], optimizer: Any, opt_param_scheduler: Any, which: str, strict: bool) -> int:
    """Let Megatron load what it has saved itself. Collective over all ranks.

    Args:
        model: the list of them that Megatron makes.
        optimizer, opt_param_scheduler, strict: as those of Megatron's ``load_checkpoint``.
        which: the argument that names the directory.

    Returns:
        The iteration; 0 where the training is none of Megatron's, or has no directory.
    """
    directory = getattr(arguments(), which, None)
    if directory is None:
        return 0
    from megatron.training.checkpointing import load_checkpoint as of_megatron

    log.info("loading Megatron's own checkpoint from %s", directory)
    found = of_megatron(model, optimizer, opt_param_scheduler, which, strict)
    return int(found[0] if isinstance(found, tuple) else found)


def save(iteration: int, model: Sequence[Any], optimizer: Any, opt_param_scheduler: Any) -> None:
    """Let Megatron save, if the training is one of Megatron's, and has a directory. Collective over all ranks."""
    given = arguments()
    if getattr(given, "save", None) is None:
        return
    from megatron.training.checkpointing import save_checkpoint as of_megatron

    operations = getattr(given, "num_floating_point_operations_so_far", 0)
    of_megatron(iteration, model, optimizer, opt_param_scheduler, operations)
