"""Choose the checkpoint that a training starts from: the newest of memory, the directory and the Trainer's own."""

from __future__ import annotations

import dataclasses
import logging
import re
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME

from mlflash import Checkpointer
from mlflash.errors import StructureMismatch
from mlflash.state.plain_values import decode_plain

from .states import Found

log = logging.getLogger("mlflash")


@dataclasses.dataclass(frozen=True)
class OnDisk:
    """What the Trainer has written.

    Attributes:
        step, path: those of the newest complete checkpoint. None: there is none.
        is_empty: whether there is not even an incomplete checkpoint.
    """

    step: int | None
    path: str | None
    is_empty: bool


def start_from(checkpointer: Checkpointer, output_dir: str, whole: str) -> Found | str | bool | None:
    """Find the newest checkpoint. If one of mlflash and one of the Trainer are equally new, take that of mlflash.

    Collective over all ranks.

    Args:
        checkpointer: an open Checkpointer.
        output_dir: the Trainer's folder.
        whole: pattern of a file that a checkpoint of the Trainer has if it contains an optimizer.

    Returns:
        The checkpoint of mlflash, or what to resume from, as the Trainer takes it: a path; True, with which the Trainer
        raises its own error; or None to start from the beginning.

    Raises:
        Unrestorable: mlflash has checkpoints, but none can be loaded, and the Trainer has written none.
    """
    disk: OnDisk = checkpointer.adapting.seen_by_first(lambda: _look(Path(output_dir), whole))
    step = checkpointer.adapting.newest_step(disk.path)
    found = None if step is None else _in_memory(checkpointer, step)
    if found is not None and (disk.step is None or disk.step <= found.step):
        return found
    if disk.path is not None:
        log.info("starting from %s: mlflash has %s", disk.path, "nothing" if found is None else f"step {found.step}")
        return disk.path
    return None if disk.is_empty else True


def _in_memory(checkpointer: Checkpointer, step: int) -> Found:
    """Open a checkpoint, and read its small parts."""
    opened = checkpointer.adapting.open(step)
    assert opened is not None
    try:
        first = opened.olds[min(opened.olds)]
        text = decode_plain(first.plain.get("trainer"))
        if not isinstance(text, str):
            raise StructureMismatch(
                "this checkpoint was not saved through mlflash.adapters.transformers", step=opened.step
            )
        return Found(opened.step, text, frozenset(entry.name for entry in first.entries))
    finally:
        opened.close()


def _look(directory: Path, whole: str) -> OnDisk:
    """Look at a Trainer's directory. Not collective."""
    there = {int(path.name[len("checkpoint-") :]): path for path in directory.glob("checkpoint-*")
             if re.fullmatch(r"checkpoint-[0-9]+", path.name) and path.is_dir()}  # fmt: skip
    # Without an optimizer the Trainer would go on without saying so.
    ended = [step for step, path in there.items() if (path / TRAINER_STATE_NAME).is_file() and any(path.glob(whole))]
    newest = max(ended, default=None)
    return OnDisk(newest, None if newest is None else str(there[newest]), not there)
