"""A DeepSpeed engine's own checkpoints: it writes them to memory, and they are moved to storage in the background.

The files are DeepSpeed's, so it loads them without mlflash. A checkpoint gets its name when all files of all ranks have
arrived. After that ``latest`` names it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from mlflash import Checkpointer

from ..replacing import replaced


class OwnFiles:
    """Moves the own checkpoints of one engine. Collective over all ranks. Close it at the end.

    Args:
        engine: DeepSpeed's engine.
        checkpointer: the engine's Checkpointer.
        save: the engine's own ``save_checkpoint``.
    """

    def __init__(self, engine: Any, checkpointer: Checkpointer, save: Callable[..., object]):
        self._engine, self._save = engine, save
        self._files = checkpointer.adapting.own_files()

    def save(self, save_dir: str, tag: str | None, client_state: Any, save_latest: bool, exclude: bool) -> None:
        """Let DeepSpeed write a checkpoint to memory, or to storage if some rank has no room. Collective.

        Args:
            save_dir, tag, client_state, save_latest, exclude: as those of ``engine.save_checkpoint``.

        Raises:
            SaveFailed: only with ``strict``, on all ranks: the checkpoint before could not be moved.
        """
        engine, tag = self._engine, f"global_step{self._engine.global_steps}" if tag is None else str(tag)
        target = os.path.abspath(os.path.join(save_dir, tag))
        if engine.use_node_local_storage() or not self._files.begin(
            target
        ):  # no rank can wait for files on another node
            self._save(save_dir, tag, client_state, save_latest, exclude)
            return
        notes = {os.path.join(os.path.dirname(target), "latest"): tag} if save_latest else {}
        if engine.global_rank == 0:
            os.makedirs(save_dir, exist_ok=True)
        copy_script = engine._copy_recovery_script  # the script belongs next to the checkpoints, not into one
        with (
            self._files.directory(target, notes) as path,
            replaced(engine, _copy_recovery_script=lambda folder: copy_script(save_dir)),
        ):
            self._save(os.fspath(path.parent), tag, client_state, False, exclude)

    def finish(self) -> None:
        """Wait until all checkpoints are in storage. Not collective."""
        self._files.finish()

    def close(self) -> None:
        """Close without waiting. The rest is still moved in the background. Not collective."""
        self._files.close()
