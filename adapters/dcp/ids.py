"""Checkpoint ids ↔ steps."""

from __future__ import annotations

import os
import re

from mlflash import Checkpointer
from mlflash.errors import StepNotFound

_STEP = re.compile(r"(?:.*\D)?(\d{1,18})")


def step_of(checkpoint_id: str | os.PathLike[str] | int) -> int:
    """Tell the step that a checkpoint id means: 12 for 12, ``"12"``, ``"step-00000012"`` and ``"/path/to/step-12"``.

    Not collective.

    Raises:
        StepNotFound: it does not end with a number.
    """
    if isinstance(checkpoint_id, int):
        return checkpoint_id
    name = os.path.basename(os.fspath(checkpoint_id).rstrip("/"))
    found = _STEP.fullmatch(name)
    if found is None:
        raise StepNotFound("a checkpoint id must end with the number of the step", expected="such as step-00000012",
                           found=repr(checkpoint_id))  # fmt: skip
    return int(found[1])


def names_a_step(checkpoint_id: str | os.PathLike[str] | int) -> bool:
    """Whether `step_of` knows the step of an id."""
    try:
        return step_of(checkpoint_id) >= 0
    except StepNotFound:
        return False


def latest(checkpointer: Checkpointer) -> str | None:
    """Name the newest checkpoint that can be loaded, such as ``"step-00000012"``; None where there is none.

    Collective over the Checkpointer's comm. Every byte of it is verified: an older one is named where the newest is
    damaged beyond repair. The newest is the one saved last.

    Raises:
        Unrestorable: checkpoints are there, and none of them can be loaded.
    """
    step = checkpointer.adapting.newest_step()
    return None if step is None else f"step-{step:08d}"
