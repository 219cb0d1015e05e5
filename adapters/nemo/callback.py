"""When a training of NeMo is saved in memory, and what becomes of that at its end."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from nemo.lightning.io.pl import TrainerContext

from mlflash.checkpointer.disabled import turned_off
from mlflash.errors import ConfigError
from mlflash.protocol.torch_rank import check_torch_rank

from .. import intervals
from ..ids import step_of
from ..lightning.loops import OwnSaves, at_step_ends
from ..lightning.packages import leave_mpi_alone
from ..lightning.resume import restore_together
from .checkpoint_io import MLFlashCheckpointIO
from .memory import OF_RANK, Memory, delete
from .own_files import OwnFiles
from .position import go_on


class MLFlashCheckpointCallback(Callback):
    """Saves in memory every so many steps, or whenever NeMo saves.

    It does so once `wrap_trainer_and_auto_resume_with_mlflash` has wrapped its trainer.

    Args:
        checkpoint_base_container: names the checkpoints, as for the wrap: another one for each job, and the same one
            when a job starts again. It is no directory; nothing is written there.
        every_n_steps: a checkpoint in memory every so many steps (``trainer.global_step``). Default: whenever NeMo
            saves, by its ModelCheckpoint or ``trainer.save_checkpoint``; without any nothing is saved, and a warning
            says so.
        skip_every_n_steps: but not where the step is a multiple of this: there NeMo writes one to disk. 0: none.
        enabled: False, or ``MLFLASH_DISABLE=1``: nothing is done.
        keep_mlflash_checkpoint_on_train_end: whether checkpoints stay in memory when training has come to its end.

    Attributes:
        memory: those of a `MegatronStrategy`, once its trainer is wrapped.
    """

    def __init__(self, checkpoint_base_container: str | os.PathLike[str], every_n_steps: int | None = None,
                 skip_every_n_steps: int | None = None, enabled: bool = True,
                 keep_mlflash_checkpoint_on_train_end: bool = False):  # fmt: skip
        intervals.check(every_n_steps, skip_every_n_steps or None)
        leave_mpi_alone()
        self.base, self.enabled = os.fspath(checkpoint_base_container), not turned_off(enabled)
        self.every, self.skip = every_n_steps, skip_every_n_steps or None
        self.keep = keep_mlflash_checkpoint_on_train_end
        self.memory: Memory | None = None
        self._place: tuple[str, str] | None = None
        self._with_context = self._in_background = False
        self._files: OwnFiles | None = None
        self._undo: list[Callable[[], None]] = []
        self._step = 0
        self._own: OwnSaves | None = None

    def save_through(self, memory: Memory, with_context: bool, in_background: bool) -> None:
        """Let `Trainer.save_checkpoint` save, by paths below the base. Not collective."""
        self.memory, self._place = memory, memory.place
        self._with_context, self._in_background = with_context, in_background

    def stand_by(self, place: tuple[str, str]) -> None:
        """Leave saving to Lightning's callback, which comes before this one. Not collective."""
        self._place = place

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Open the Checkpointer, if it is not open yet. Collective.

        Raises:
            ConfigError: the trainer was not wrapped; or what is to be written in the background cannot be.
            WorldMismatch: torch.distributed has other ranks than the launcher.
        """
        if stage != "fit" or not self.enabled:
            return
        if self._place is None:
            raise ConfigError("wrap_trainer_and_auto_resume_with_mlflash(trainer, ...) has to come before fit")
        if self.memory is not None:
            ranks = self.memory.checkpointer.adapting.ranks
            check_torch_rank(ranks.rank, ranks.size, ranks.torch_group)
            self._own = OwnSaves(trainer, self.memory.checkpointer, self.every, self.skip, self.memory.holds)
            self._own.say_when()
            self._undo.append(self._own.undo)
            wait_staged = self.memory.checkpointer.adapting.wait_staged
            self._undo.append(at_step_ends(trainer, lambda has_ended: self._end_step(trainer, has_ended), wait_staged))
            restores = restore_together(trainer._checkpoint_connector, lambda work: self._together(trainer, work))
            self._undo.append(restores)
            if self._in_background:
                self._files = OwnFiles(trainer, self.memory.checkpointer)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Take the training's context, where that is to be saved. Collective.

        Raises:
            ConfigError: something has replaced the CheckpointIO, as PEFT does.
            StateError: on the other ranks, where NeMo could not describe the training on rank 0.
        """
        if self.memory is None:
            return
        checkpoint_io = trainer.strategy.unwrapped_checkpoint_io
        if not isinstance(checkpoint_io, MLFlashCheckpointIO):
            raise ConfigError("the strategy has another CheckpointIO than when it was wrapped, for example that of "
                              "PEFT: mlflash cannot keep its checkpoints in memory",
                              found=type(checkpoint_io).__name__)  # fmt: skip
        if self._with_context:
            self.memory.checkpointer.adapting.seen_by_first(lambda: self._take_context(trainer))

    def _take_context(self, trainer: Any) -> None:
        assert self.memory is not None
        self.memory.context = _context_of(trainer)

    def _together(self, trainer: Any, work: Callable[[], Any]) -> Any:
        """Load a part of a checkpoint, if it is one from memory on all ranks or on none. Collective."""
        path = trainer.ckpt_path
        if self.memory is None or path is None or not self.memory.holds(path):
            return work()
        return self.memory.checkpointer.adapting.load_together(step_of(path), work)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Go on where this rank was, if the checkpoint is from memory."""
        at = checkpoint.pop(OF_RANK, None)
        if at is not None:
            self._undo.append(go_on(trainer, checkpoint, at))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Note where training begins."""
        self._step = trainer.global_step

    def _end_step(self, trainer: Any, epoch_has_ended: bool) -> None:
        """Save, where a step has ended that is one of those. Collective."""
        assert self.memory is not None and self._own is not None
        step, before = trainer.global_step, self._step
        self._step = step
        if not self._own.is_due(step != before):
            return
        self.memory.epoch_has_ended = epoch_has_ended
        try:
            trainer.save_checkpoint(self.memory.path_of(step))
        finally:
            self.memory.epoch_has_ended = None

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Wait for what is on its way to disk, before NeMo writes there what belongs to the end. Not collective."""
        if self._files is not None:
            self._files.end()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Close; then delete what is in memory, if it is not to be kept. Collective."""
        if stage != "fit" or self._place is None:
            return
        with contextlib.ExitStack() as stack:  # it is closed, whatever another part of the end raises
            if self.memory is not None:
                stack.callback(self.memory.close)
            self._close_files(stack)
            self._let_loops_be(stack)
        if not self.keep:
            delete(*self._place)

    def on_exception(self, *args: Any, **kwargs: Any) -> None:
        """Close without waiting for other ranks; what is in memory stays."""
        with contextlib.ExitStack() as stack:
            if self.memory is not None:
                stack.callback(self.memory.abandon)
            self._close_files(stack)
            self._let_loops_be(stack)

    def _close_files(self, stack: contextlib.ExitStack) -> None:
        files, self._files = self._files, None
        if files is not None:
            stack.callback(files.close)

    def _let_loops_be(self, stack: contextlib.ExitStack) -> None:
        for undo in self._undo:
            stack.callback(undo)
        self._undo = []


def _context_of(trainer: Any) -> dict[str, bytes]:
    """What NeMo saves as a training's context (its model, its trainer), by file name."""
    with tempfile.TemporaryDirectory(prefix="mlflash-nemo-") as directory:
        TrainerContext.from_trainer(trainer).io_dump(Path(directory), yaml_attrs=["model"])
        files = [path for path in Path(directory).rglob("*") if path.is_file()]
        return {str(path.relative_to(directory)): path.read_bytes() for path in files}
