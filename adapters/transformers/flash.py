"""Save a Trainer's training in memory, and choose what it starts from.

This module replaces methods of one trainer, which the Trainer calls on all ranks. Except for `train`, they are replaced
only while it trains.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers import trainer as module
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from mlflash import Checkpointer
from mlflash.checkpointer.adapter_api import OwnFiles
from mlflash.checkpointer.off import turned_off
from mlflash.errors import ConfigError, StructureMismatch
from mlflash.state.plain_values import decode_plain

from .. import intervals
from ..newest import OnDisk, newest_in_memory
from ..replacing import once_staged, replaced
from .states import Found, State, has_ended, state_of

log = logging.getLogger("mlflash")


class MLFlashCallback(TrainerCallback):
    """Saves a Trainer's training in memory. Give it to the Trainer when you make the Trainer.

    ``trainer.train(resume_from_checkpoint=True)`` then starts from the newest checkpoint of memory, ``directory`` and
    the Trainer's ``output_dir``, or from the beginning if there is none. If you give a path instead, it starts from
    that path, whatever is in memory.

    Args:
        every_n_steps: save in memory if the step is a multiple of this. Default: save whenever the Trainer saves,
            because of ``save_strategy`` or a callback. With ``save_strategy="no"`` and no such callback nothing is
            saved, and a warning says so.
        skip_every_n_steps: do not save if the step is a multiple of this, for example where the Trainer writes to disk.
        enabled: False, or ``MLFLASH_DISABLE=1``: the callback does nothing, except that
            ``resume_from_checkpoint=True`` still starts from the beginning if the Trainer has written no checkpoint.
        directory: where checkpoints are drained or scavenged to. Default: ``mlflash`` in the Trainer's ``output_dir``.
            Nothing is written there without ``drain_every`` or another request.
        in_background: True: the Trainer writes its own checkpoints to memory, and the same files are moved to
            ``output_dir`` while training continues, all of them or none. Until then each takes its size of memory.
        settings: as those of a Checkpointer. Under DDP ``replicated`` covers weights and optimizer by default. With
            ``strict`` a failed save is an exception instead of a warning.

    Attributes:
        checkpointer: the Checkpointer, open while the Trainer trains.

    Raises:
        ConfigError: an interval makes no sense.
    """

    def __init__(self, every_n_steps: int | None = None, skip_every_n_steps: int | None = None, enabled: bool = True,
                 directory: str | os.PathLike[str] | None = None, in_background: bool = False,
                 **settings: Any):  # fmt: skip
        intervals.check(every_n_steps, skip_every_n_steps)
        self.checkpointer: Checkpointer | None = None
        self._every, self._skip, self._enabled = every_n_steps, skip_every_n_steps, not turned_off(enabled)
        self._directory, self._settings, self._in_background = directory, settings, in_background
        self._state: State | None = None
        self._is_due = self._epoch_has_ended = self._is_over = False

    def attach(self, trainer: Any) -> None:
        """Let a trainer, which must have this callback, start from the newest checkpoint and save. Not collective.

        Raises:
            ConfigError: the trainer already does so for another callback.
        """
        if not self._enabled:
            _begin_afresh_or_resume(trainer)
            return
        others = [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, MLFlashCallback)]
        if any(callback is not self and callback._enabled for callback in others):
            raise ConfigError("this Trainer has an MLFlashCallback already, and two would write to the same memory: "
                              "leave one out")  # fmt: skip
        train = trainer.train

        @functools.wraps(train)
        def from_newest(resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
            if self not in trainer.callback_handler.callbacks:  # the callback was removed
                return train(resume_from_checkpoint, *args, **kwargs)
            with self._training(trainer, resume_from_checkpoint) as start:
                return train(start, *args, **kwargs)

        trainer.train = from_newest

    # What the Trainer calls

    def on_init_end(self, *args: Any, **kwargs: Any) -> None:
        """Find the Trainer that is being made. Not collective.

        It searches the callers for it, because no hook gets the Trainer, and `train` reads what to resume from before
        it calls any hook.
        """
        frame = sys._getframe(1)
        while not isinstance(frame.f_locals.get("self"), Trainer):
            assert frame.f_back is not None, "only a Trainer calls this"
            frame = frame.f_back
        self.attach(frame.f_locals["self"])

    def on_train_begin(self, args: Any, state: Any, *more: Any, **kwargs: Any) -> None:
        """Continue with the sums of the interrupted training. Not collective."""
        self._is_over = state.global_step >= state.max_steps
        if self._state is not None:
            self._state.of_rank.begin()
        elif self._enabled:
            raise ConfigError("give MLFlashCallback to the Trainer when it is made, as callbacks=[...], or use "
                              "TrainerWrapper(trainer) for a Trainer that you have already")  # fmt: skip

    def on_epoch_begin(self, *args: Any, train_dataloader: Any = None, **kwargs: Any) -> None:
        """Note the random number state at the begin of an epoch, or set it. Not collective."""
        if self._state is not None:
            self._state.of_rank.begin_epoch(train_dataloader)

    def on_step_end(self, args: Any, state: Any, *more: Any, **kwargs: Any) -> None:
        self._is_due = self._every is not None and intervals.is_due(state.global_step, self._every, self._skip)
        self._epoch_has_ended = False

    def on_save(self, args: Any, state: Any, *more: Any, **kwargs: Any) -> None:
        if self._every is None:
            self._is_due = intervals.is_due(state.global_step, None, self._skip)

    def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        self._epoch_has_ended = True

    # A training

    @contextlib.contextmanager
    def _training(self, trainer: Any, resume: Any) -> Iterator[Any]:
        """Set everything up for a training, and give what it resumes from. Collective."""
        state = state_of(trainer)
        directory = self._directory or os.path.join(trainer.args.output_dir, "mlflash")
        with contextlib.ExitStack() as stack:
            self.checkpointer = stack.enter_context(Checkpointer(directory, **{**state.settings, **self._settings}))
            self._state = state
            stack.callback(self._forget)
            goes_on = self._goes_on(trainer)
            stack.callback(state.close)
            self._say_when(trainer)
            if self._in_background:
                stack.callback(_own_files(trainer, self.checkpointer).close)
            hooks, wait_staged = trainer.callback_handler, self.checkpointer.adapting.wait_staged
            stack.enter_context(replaced(
                trainer,
                _maybe_log_save_evaluate=self._then_save(trainer),
                get_batch_samples=self._unless_over(trainer),
                _load_best_model=once_staged(wait_staged, trainer._load_best_model),
            ))  # fmt: skip
            changing = ("on_epoch_begin", "on_epoch_end", "on_train_end")
            # Callbacks may give the model other weights there, such as averages.
            hold_back = {name: once_staged(wait_staged, getattr(hooks, name)) for name in changing}
            stack.enter_context(replaced(hooks, **hold_back))
            start = resume
            if resume is True or goes_on:
                start = start_from(self.checkpointer, trainer.args.output_dir, state.whole)
            if isinstance(start, Found):
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mlflash-")))
                (folder / TRAINER_STATE_NAME).write_text(start.text)
                stack.enter_context(state.loading(self.checkpointer, start))
                start = str(folder)
            elif start is not None:
                self.checkpointer.adapting.loaded_elsewhere()
            yield start

    def _goes_on(self, trainer: Any) -> bool:
        """Whether a lost rank has interrupted this training, which `keep_alive` runs again. Not collective."""
        assert self.checkpointer is not None
        if not self.checkpointer.adapting.undefined:
            return False
        if trainer.args.process_index != self.checkpointer.adapting.ranks.rank:
            raise ConfigError("make TrainingArguments and Trainer inside the function that keep_alive calls: they were "
                              "made before this process had its rank", rank=self.checkpointer.adapting.ranks.rank,
                              found=trainer.args.process_index)  # fmt: skip
        return True

    def _say_when(self, trainer: Any) -> None:
        assert self.checkpointer is not None
        strategy = trainer.args.save_strategy.value
        why = ('save_strategy is "no", and no callback has asked for a save so far. To save, set save_mem_interval=... '
               'of TrainerWrapper or every_n_steps=... of MLFlashCallback')  # fmt: skip
        intervals.say(self.checkpointer, self._every, self._skip, f'the Trainer saves (save_strategy="{strategy}")',
                      why if strategy == "no" else "")  # fmt: skip

    def _forget(self) -> None:
        self.checkpointer = self._state = None

    def _then_save(self, trainer: Any) -> Callable[..., None]:
        """Save a step after it is logged and evaluated, because the results belong to the step. Collective."""
        # The Trainer calls it twice if an epoch ends early.
        checkpointer, state = self.checkpointer, self._state
        assert checkpointer is not None and state is not None
        log_save_evaluate = once_staged(checkpointer.adapting.wait_staged, trainer._maybe_log_save_evaluate)

        def and_save(*args: Any, **kwargs: Any) -> None:
            if self._is_over:  # the run before did everything for the last step
                return
            log_save_evaluate(*args, **kwargs)
            if self._is_due and (self._epoch_has_ended or not has_ended(trainer)):  # or else it calls this once more
                self._is_due, step = False, trainer.state.global_step
                if step != checkpointer.last_step:  # the Trainer saves a step twice if an epoch ends early
                    state.save(checkpointer.adapting, step)

        return and_save

    def _unless_over(self, trainer: Any) -> Callable[..., Any]:
        """Give no batches to a training that has already made all its steps, or the Trainer would make one more."""
        batches = trainer.get_batch_samples

        def get(*args: Any, **kwargs: Any) -> Any:
            if not self._is_over:
                return batches(*args, **kwargs)
            trainer.control.should_training_stop = True
            return [], None

        return get


def _begin_afresh_or_resume(trainer: Any) -> None:
    """Let the next `train(resume_from_checkpoint=True)` start from the beginning if there is nothing on disk.

    The Trainer itself would refuse that. Not collective. After that call nothing stays replaced.
    """
    train = trainer.train

    @functools.wraps(train)
    def once(resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        undo.close()
        folder = trainer.args.output_dir
        if resume_from_checkpoint is True and not (os.path.isdir(folder) and get_last_checkpoint(folder)):
            resume_from_checkpoint = None
        return train(resume_from_checkpoint, *args, **kwargs)

    undo = replaced(trainer, train=once)


def TrainerWrapper(
    trainer: Any, save_mem_interval: int | None = None, *, directory: str | os.PathLike[str] | None = None,
    skip_every_n_steps: int | None = None, enabled: bool = True, in_background: bool = False, **settings: Any,
) -> Any:  # fmt: skip
    """Let a Trainer save in memory and start from there, with an `MLFlashCallback`.

    Not collective.

    Args:
        trainer: a Hugging Face Trainer, or an object of a subclass.
        save_mem_interval: save in memory if the step is a multiple of this. Default: save whenever the Trainer saves,
            see `MLFlashCallback`.
        directory, skip_every_n_steps, enabled, in_background, settings: see `MLFlashCallback`.

    Returns:
        The same trainer.

    Raises:
        ConfigError: an interval makes no sense, or the Trainer already has an `MLFlashCallback`.
    """
    callback = MLFlashCallback(save_mem_interval, skip_every_n_steps, enabled, directory, in_background, **settings)
    trainer.add_callback(callback)
    callback.attach(trainer)
    return trainer


# The Trainer's own checkpoints.


def _own_files(trainer: Any, checkpointer: Checkpointer) -> OwnFiles:
    """Let the Trainer write the checkpoints of one training to memory. Collective over all ranks, as its saves are."""
    if trainer.args.push_to_hub:
        raise ConfigError("the Trainer cannot upload checkpoints that are moved in the background: leave out "
                          "in_background or push_to_hub")  # fmt: skip
    files = checkpointer.adapting.own_files()
    directory, write, load_best = trainer._get_output_dir, trainer._save_checkpoint, trainer._load_best_model

    def save(model: Any, trial: Any) -> None:
        folder, state = directory(trial), trainer.state
        target = os.path.join(folder, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        if not files.begin(target):
            write(model, trial)
            return
        with files.directory(target) as path:
            written = os.fspath(path.parent)
            with replaced(trainer, _get_output_dir=lambda trial: written):
                write(model, trial)
            best = _best(trainer, folder, written)
            if best != state.best_model_checkpoint:
                state.best_model_checkpoint = best
                if trainer.args.should_save:
                    state.save_to_json(os.path.join(path, TRAINER_STATE_NAME))
        if trainer.args.should_save:
            files.when_moved(lambda: _rotate(trainer, folder))

    def output_dir(trial: Any) -> str:
        files.finish()
        return str(directory(trial))

    def load_best_model() -> None:
        files.finish()
        load_best()

    files.replaced.enter_context(replaced(
        trainer, _save_checkpoint=save, _get_output_dir=output_dir, _load_best_model=load_best_model,
    ))  # fmt: skip
    return files


def _best(trainer: Any, folder: str, written: str) -> str | None:
    """Find the best checkpoint. The Trainer saw no older one in the folder in memory where it just wrote."""
    state, best = trainer.state, trainer.state.best_model_checkpoint
    if best is not None and os.path.dirname(best) == written:
        return os.path.join(folder, os.path.basename(best))
    older = os.path.join(folder, f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}")
    is_kept = state.best_global_step and trainer.args.save_strategy.value != "no" and os.path.isdir(older)
    return older if is_kept else best


def _rotate(trainer: Any, folder: str) -> None:
    """Delete older checkpoints, as the Trainer does after each save, now that the newest has arrived."""
    if hasattr(module, "rotate_checkpoints"):
        module.rotate_checkpoints(output_dir=folder, save_total_limit=trainer.args.save_total_limit,
                                  best_model_checkpoint=trainer.state.best_model_checkpoint,
                                  use_mtime=True)  # fmt: skip
    else:  # older versions have a method
        trainer._rotate_checkpoints(use_mtime=True, output_dir=folder)


# Choose the checkpoint that a training starts from: the newest of memory, the directory and the Trainer's own.


def start_from(checkpointer: Checkpointer, output_dir: str, whole: str) -> Found | str | bool | None:
    """Find the newest checkpoint. If one of mlflash and one of the Trainer are equally new, take that of mlflash.

    Collective over all ranks.

    Args:
        output_dir: the Trainer's folder.
        whole: pattern of a file that a checkpoint of the Trainer has if it contains an optimizer.

    Returns:
        The checkpoint of mlflash, or what to resume from, as the Trainer takes it: a path; True, with which the Trainer
        raises its own error; or None to start from the beginning.

    Raises:
        Unrestorable: mlflash has checkpoints, but none can be loaded, and the Trainer has written none.
    """
    disk, is_empty = checkpointer.adapting.seen_by_first(lambda: _look(Path(output_dir), whole))
    step = newest_in_memory(checkpointer, disk)
    if step is not None:
        return _in_memory(checkpointer, step)
    if disk.path is not None:
        log.info("starting from %s: mlflash has nothing newer", disk.path)
        return str(disk.path)
    return None if is_empty else True


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


def _look(directory: Path, whole: str) -> tuple[OnDisk, bool]:
    """Give the newest complete checkpoint, and whether there is none that the Trainer has finished."""
    finished = {int(path.name[len("checkpoint-") :]): path for path in directory.glob("checkpoint-*")
                if re.fullmatch(r"checkpoint-[0-9]+", path.name) and path.is_dir() and _is_finished(path)}  # fmt: skip
    # Without an optimizer the Trainer would go on without saying so.
    ended = [step for step, path in finished.items() if any(path.glob(whole))]
    newest = max(ended, default=None)
    return OnDisk(None if newest is None else str(finished[newest]), newest), not finished


def _is_finished(path: Path) -> bool:
    """Whether the state of the Trainer, which it writes last, is whole."""
    try:
        json.loads((path / TRAINER_STATE_NAME).read_text())
    except (FileNotFoundError, ValueError) as error:
        log.warning("training does not start from %s, which the Trainer did not finish: %r", path, error)
        return False
    return True
