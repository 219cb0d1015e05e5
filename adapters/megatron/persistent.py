"""Which checkpoint Megatron itself has written to disk: what a training goes on from besides those in memory."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any


def arguments() -> Any:
    """Megatron's; none where this is a training loop without them."""
    training = sys.modules.get("megatron.training")
    return argparse.Namespace() if training is None else training.get_args()


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
        said = "" if directory is None else Path(directory, "latest_checkpointed_iteration.txt").read_text().strip()
    except OSError:
        return 0
    return int(said) if said.isdecimal() else 0
