"""Decide when a NeMo training is saved in memory, and delete or keep the checkpoints at its end."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from nemo.lightning.ckpt_utils import ckpt_to_dir
from nemo.lightning.io.pl import TrainerContext
from nemo.lightning.pytorch.callbacks import ModelCheckpoint

from mlflash import Checkpointer, rng
from mlflash.channel.ranks import check_torch_rank
from mlflash.checkpointer.adapter_api import OwnFiles
from mlflash.checkpointer.off import turned_off
from mlflash.errors import ConfigError

from .. import intervals
from ..ids import step_of
from ..lightning.loops import StepEnds, before_first_step, restore_together
from ..lightning.packages import take_ranks_of_launcher
from ..replacing import replaced
from .checkpoint_io import MLFlashCheckpointIO
from .memory import OF_RANK, Memory, delete


class MLFlashCheckpointCallback(Callback):
    """Saves in memory every so many steps, or whenever NeMo saves.

    It saves only if `wrap_trainer_and_auto_resume_with_mlflash` has wrapped its trainer.

    Args:
        checkpoint_base_container: names the checkpoints. Give the same name to the wrap function. Each job needs
            another name, and keeps it when it starts again. It is not a directory, and nothing is written there.
        every_n_steps: save in memory if ``trainer.global_step`` is a multiple of this. Default: save whenever NeMo
            saves, through its ModelCheckpoint or ``trainer.save_checkpoint``. If NeMo does neither, nothing is saved,
            and a warning says so.
        skip_every_n_steps: do not save if the step is a multiple of this, for example where NeMo writes to disk. 0:
            skip none.
        enabled: False, or ``MLFLASH_DISABLE=1``: the callback does nothing.
        keep_mlflash_checkpoint_on_train_end: whether checkpoints stay in memory when training has ended.

    Attributes:
        memory: the checkpoints of a `MegatronStrategy`, when its trainer is wrapped.
    """

    def __init__(self, checkpoint_base_container: str | os.PathLike[str], every_n_steps: int | None = None,
                 skip_every_n_steps: int | None = None, enabled: bool = True,
                 keep_mlflash_checkpoint_on_train_end: bool = False):  # fmt: skip
        intervals.check(every_n_steps, skip_every_n_steps or None)
        take_ranks_of_launcher()
        self.base, self.enabled = os.fspath(checkpoint_base_container), not turned_off(enabled)
        self.every, self.skip = every_n_steps, skip_every_n_steps or None
        self.keep = keep_mlflash_checkpoint_on_train_end
        self.memory: Memory | None = None
        self._place: tuple[str, str] | None = None
        self._with_context = self._in_background = False
        self._files: OwnFiles | None = None
        self._undo = contextlib.ExitStack()

    def save_through(self, memory: Memory, with_context: bool, in_background: bool) -> None:
        """Save through `Trainer.save_checkpoint` with paths below the base. Not collective."""
        self.memory, self._place = memory, memory.place
        self._with_context, self._in_background = with_context, in_background

    def stand_by(self, place: tuple[str, str]) -> None:
        """Leave saving to the callback of mlflash's Lightning adapter, which comes before this one. Not collective."""
        self._place = place

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Open the Checkpointer, if it is not open yet. Collective."""
        if stage != "fit" or not self.enabled:
            return
        if self._place is None:
            raise ConfigError("wrap_trainer_and_auto_resume_with_mlflash(trainer, ...) has to come before fit")
        if self.memory is not None:
            ranks = self.memory.checkpointer.adapting.ranks
            check_torch_rank(ranks.rank, ranks.size, ranks.torch_group)
            end_step, together = functools.partial(self._end_step, trainer), functools.partial(self._together, trainer)
            ends = StepEnds(trainer, self.memory.checkpointer, self.every, self.skip, end_step, self.memory.holds)
            self._undo.enter_context(ends.replaced)
            self._undo.enter_context(restore_together(trainer._checkpoint_connector, together))
            if self._in_background:
                self._files = _own_files(trainer, self.memory.checkpointer)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Read the training's context, if it is to be saved. Collective."""
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
        """Load a part of a checkpoint. If it is in memory, load it on all ranks or on none. Collective."""
        path = trainer.ckpt_path
        if self.memory is None or path is None or not self.memory.holds(path):
            return work()
        return self.memory.checkpointer.adapting.load_together(step_of(path), work)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """If the checkpoint is from memory, continue where this rank was."""
        at = checkpoint.pop(OF_RANK, None)
        if at is not None:
            self._undo.enter_context(_go_on(trainer, checkpoint, at))

    def _end_step(self, trainer: Any, is_new: bool, is_due: bool, epoch_has_ended: bool) -> None:
        assert self.memory is not None
        if not is_due:
            return
        self.memory.epoch_has_ended = epoch_has_ended
        try:
            trainer.save_checkpoint(self.memory.path_of(trainer.global_step))
        finally:
            self.memory.epoch_has_ended = None

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Wait until moved files are on disk, before NeMo writes its last checkpoint there. Not collective."""
        if self._files is not None:
            self._files.replaced.close()
            self._files.finish()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Close. Then delete the checkpoints in memory, unless they are to be kept. Collective."""
        if stage != "fit" or self._place is None:
            return
        self._end(Memory.close)
        if not self.keep:
            delete(*self._place)

    def on_exception(self, *args: Any, **kwargs: Any) -> None:
        """Close without waiting for other ranks. Checkpoints in memory stay."""
        self._end(Memory.abandon)

    def _end(self, close: Callable[[Memory], None]) -> None:
        files, self._files = self._files, None
        with contextlib.ExitStack() as stack:  # close everything, even if a part raises
            if self.memory is not None:
                stack.callback(close, self.memory)
            if files is not None:
                stack.callback(files.close)
            stack.callback(self._undo.close)


def _go_on(trainer: Any, checkpoint: dict[str, Any], at: dict[str, Any]) -> contextlib.ExitStack:
    """Let Lightning's fit loop continue where this rank was, before the loop is restored. Give what undoes it."""
    loop, has_ended = trainer.fit_loop, at["epoch has ended"]
    if at["loaders"]:
        checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = at["loaders"]

    def set_numbers() -> None:
        rng().load_state_dict(at["rng"])
        get_cuda_rng_tracker().set_states(at["tracker"])

    def prepare(fetcher: Any) -> None:
        if not has_ended:  # data loaders have drawn some for the rest of the epoch
            set_numbers()

    def begin_epoch() -> None:
        undo.close()
        set_numbers()  # data loaders drew some at their setup; now come those of the new epoch
        loop.on_advance_start()

    undo = replaced(loop, **({"on_advance_start": begin_epoch} if has_ended else {}))
    undo_all = before_first_step(loop, has_ended, prepare)
    undo_all.callback(undo.close)
    return undo_all


def _context_of(trainer: Any) -> dict[str, bytes]:
    """Give the files that NeMo saves as a training's context (its model and trainer), by name."""
    with tempfile.TemporaryDirectory(prefix="mlflash-nemo-") as directory:
        TrainerContext.from_trainer(trainer).io_dump(Path(directory), yaml_attrs=["model"])
        files = [path for path in Path(directory).rglob("*") if path.is_file()]
        return {str(path.relative_to(directory)): path.read_bytes() for path in files}


# NeMo's own checkpoints. They contain the context, so NeMo's AutoResume finds and loads them without mlflash. When a
# checkpoint has arrived, ``-last`` links to it. So it needs no marker for unfinished checkpoints. If a ModelCheckpoint
# deletes something meanwhile, that waits until then.


def _own_files(trainer: Any, checkpointer: Checkpointer) -> OwnFiles:
    """Let NeMo's ModelCheckpoints of one fit write to memory. Collective over all ranks, as their new methods are."""
    if trainer.strategy.async_save:
        raise ConfigError("NeMo already writes checkpoints in the background: leave out in_background, or give the "
                          "MegatronStrategy ckpt_async_save=False")  # fmt: skip
    callbacks = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    if any(callback._ema_callback(trainer) is not None for callback in callbacks):
        raise ConfigError("NeMo writes a second checkpoint, of moving averages (EMA), which in_background cannot "
                          "move: leave out in_background")  # fmt: skip
    files = checkpointer.adapting.own_files()
    for callback in callbacks:
        _write_to_memory(callback, files)
    return files


def _write_to_memory(callback: Any, files: OwnFiles) -> None:
    """Let a ModelCheckpoint write to memory, or to its place if some rank has no room."""
    write, make_link, is_there = callback._save_checkpoint, callback._link_checkpoint, callback.file_exists
    state = callback.state_dict

    def save(trainer: Any, filepath: Any) -> None:
        target = Path(ckpt_to_dir(filepath))
        if "://" in str(filepath) or not files.begin(os.fspath(target)):
            write(trainer, filepath)
            return
        with files.directory(target) as path:

            def say_where() -> None:  # the checkpoint itself contains the path, too
                last = callback.future_last_model_path
                callback.future_last_model_path = last.replace(os.fspath(path), os.fspath(target))

            def state_dict() -> Any:
                say_where()
                return state()

            with replaced(callback, state_dict=state_dict):
                write(trainer, f"{path}{callback.FILE_EXTENSION}")
            say_where()  # if only weights are saved, nobody has called `state_dict`
        callback._last_checkpoint_saved = filepath
        files.expect(target)

    def remove(trainer: Any, filepath: Any) -> None:
        files.remove_when_moved(ckpt_to_dir(filepath), functools.partial(_remove, trainer.strategy, filepath))

    def link(trainer: Any, filepath: Any, linkpath: Any) -> None:
        to, path = Path(ckpt_to_dir(filepath)), Path(ckpt_to_dir(linkpath))
        if not files.expects(to) or str(path).replace("-last", "") != str(to):
            make_link(trainer, filepath, linkpath)
            return
        if trainer.is_global_zero:
            files.link(path, to)
        files.expect(path)

    def exists(filepath: Any, *args: Any) -> bool:
        return files.would_be_there(ckpt_to_dir(filepath), lambda: is_there(filepath, *args))

    files.replaced.enter_context(replaced(
        callback, _save_checkpoint=save, _remove_checkpoint=remove, _link_checkpoint=link, file_exists=exists,
    ))  # fmt: skip


def _remove(strategy: Any, filepath: Any) -> None:
    """Delete a checkpoint as NeMo does, but without ranks that wait for each other."""
    ModelCheckpoint.set_checkpoint_unfinished_marker(filepath)
    with contextlib.suppress(OSError):
        strategy.remove_checkpoint(filepath)
    ModelCheckpoint.remove_checkpoint_unfinished_marker(filepath)
