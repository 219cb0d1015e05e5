"""When a Trainer's training is saved in memory, and what it starts from.

The Trainer calls on all ranks what is replaced here: methods of its own, in one trainer only, and, but for `train`,
only while it trains.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint

from mlflash import Checkpointer
from mlflash.checkpointer.disabled import turned_off
from mlflash.errors import ConfigError

from .. import intervals
from ..replacing import replaced
from .backends import state_of
from .own_files import OwnFiles
from .start import start_from
from .states import Found, State, has_ended


class MLFlashCallback(TrainerCallback):
    """Saves a Trainer's training in memory; to be given to the Trainer when it is made.

    ``trainer.train(resume_from_checkpoint=True)`` then starts from the newest checkpoint of memory, `directory` and the
    Trainer's ``output_dir``, and afresh where there is none. A path that is given is taken, whatever memory has.

    Args:
        every_n_steps: a checkpoint in memory every so many steps. Default: whenever the Trainer saves, by its
            ``save_strategy`` or because a callback asks for it; with "no" nothing is saved, and a warning says so.
        skip_every_n_steps: but not where the step is a multiple of this: there the Trainer writes one to disk.
        enabled: False, or ``MLFLASH_DISABLE=1``: nothing is done, but that ``resume_from_checkpoint=True`` still begins
            afresh where the Trainer has written no checkpoint.
        directory: where checkpoints are drained or scavenged to. Default: ``mlflash`` in the Trainer's ``output_dir``.
            Nothing is written there but by ``drain_every`` and the like.
        in_background: the Trainer writes its own checkpoints to memory, and they are moved to ``output_dir`` behind
            training: the same files, all of them or none. Each takes its size of memory meanwhile.
        settings: as those of a Checkpointer. Default of ``replicated``: weights and optimizer, under DDP. With
            ``strict`` a save that fails is an exception, and not a warning.

    Attributes:
        checkpointer: open while the Trainer trains.

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
        """Let a trainer start from the newest checkpoint, and save; it must have this callback. Not collective.

        Raises:
            ConfigError: it does so already, for another one.
        """
        if not self._enabled:
            _begin_afresh_or_resume(trainer)
            return
        others = [one for one in trainer.callback_handler.callbacks if isinstance(one, MLFlashCallback)]
        if any(one is not self and one._enabled for one in others):
            raise ConfigError("this Trainer has an MLFlashCallback already, and two would write to the same memory: "
                              "leave one out")  # fmt: skip
        train = trainer.train

        @functools.wraps(train)
        def from_newest(resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
            if self not in trainer.callback_handler.callbacks:  # it was removed
                return train(resume_from_checkpoint, *args, **kwargs)
            with self._training(trainer, resume_from_checkpoint) as start:
                return train(start, *args, **kwargs)

        trainer.train = from_newest

    # What the Trainer calls

    def on_init_end(self, *args: Any, **kwargs: Any) -> None:
        """Find the Trainer that is being made. Not collective.

        It is looked for among the callers: no hook is given it, and `train` reads what to resume from before any hook.
        """
        frame = sys._getframe(1)
        while not isinstance(frame.f_locals.get("self"), Trainer):
            assert frame.f_back is not None, "only a Trainer calls this"
            frame = frame.f_back
        self.attach(frame.f_locals["self"])

    def on_train_begin(self, args: Any, state: Any, *more: Any, **kwargs: Any) -> None:
        """Go on with what was summed up before. Not collective.

        Raises:
            ConfigError: the callback came to the Trainer too late.
        """
        self._is_over = state.global_step >= state.max_steps
        if self._state is not None:
            self._state.of_rank.begin()
        elif self._enabled:
            raise ConfigError("give MLFlashCallback to the Trainer when it is made, as callbacks=[...], or use "
                              "TrainerWrapper(trainer) for a Trainer that you have already")  # fmt: skip

    def on_epoch_begin(self, *args: Any, train_dataloader: Any = None, **kwargs: Any) -> None:
        """Note the random numbers that an epoch begins with, or set them. Not collective."""
        if self._state is not None:
            self._state.of_rank.begin_epoch(train_dataloader)

    def on_step_end(self, args: Any, state: Any, *more: Any, **kwargs: Any) -> None:
        """Note whether the step is one to save. Not collective."""
        self._is_due = self._every is not None and intervals.is_due(state.global_step, self._every, self._skip)
        self._epoch_has_ended = False

    def on_save(self, args: Any, state: Any, *more: Any, **kwargs: Any) -> None:
        """Note that the Trainer has saved the step, for whatever reason. Not collective."""
        if self._every is None:
            self._is_due = intervals.is_due(state.global_step, None, self._skip)

    def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        """Note that the step before was the last one of its epoch. Not collective."""
        self._epoch_has_ended = True

    # A training

    @contextlib.contextmanager
    def _training(self, trainer: Any, resume: Any) -> Iterator[Any]:
        """Save a training while it goes on; gives what it is to resume from. Collective."""
        state = state_of(trainer)
        directory = self._directory or os.path.join(trainer.args.output_dir, "mlflash")
        with contextlib.ExitStack() as stack:
            self.checkpointer = stack.enter_context(Checkpointer(directory, **{**state.settings, **self._settings}))
            self._state = state
            stack.callback(self._forget)
            stack.callback(state.close)
            self._say_when(trainer)
            if self._in_background:
                own = OwnFiles(trainer, self.checkpointer)
                stack.callback(own.close)
                stack.enter_context(replaced(trainer, **own.methods))
            stack.enter_context(replaced(
                trainer,
                _maybe_log_save_evaluate=self._then_save(trainer),
                get_batch_samples=self._unless_over(trainer),
                _load_best_model=self._once_staged(trainer._load_best_model),
            ))  # fmt: skip
            hooks = trainer.callback_handler
            stack.enter_context(replaced(
                hooks,  # callbacks may give the model other weights there, such as averages
                on_epoch_begin=self._once_staged(hooks.on_epoch_begin),
                on_epoch_end=self._once_staged(hooks.on_epoch_end),
                on_train_end=self._once_staged(hooks.on_train_end),
            ))  # fmt: skip
            start = start_from(self.checkpointer, trainer.args.output_dir, state.whole) if resume is True else resume
            if isinstance(start, Found):
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mlflash-")))
                (folder / TRAINER_STATE_NAME).write_text(start.text)
                stack.enter_context(state.loading(self.checkpointer, start))
                start = str(folder)
            yield start

    def _say_when(self, trainer: Any) -> None:
        assert self.checkpointer is not None
        strategy = trainer.args.save_strategy.value
        why = ('save_strategy is "no", and no callback has asked for a save so far. To save, set save_mem_interval=... '
               'of TrainerWrapper or every_n_steps=... of MLFlashCallback')  # fmt: skip
        intervals.say(self.checkpointer, self._every, self._skip, f'the Trainer saves (save_strategy="{strategy}")',
                      why if strategy == "no" else "")  # fmt: skip

    def _forget(self) -> None:
        self.checkpointer = self._state = None

    def _once_staged(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """Let what may change weights, and is no optimizer, wait for what saves have left to be copied."""

        @functools.wraps(work)
        def wait_and_work(*args: Any, **kwargs: Any) -> Any:
            assert self.checkpointer is not None
            self.checkpointer.adapting.wait_staged()
            return work(*args, **kwargs)

        return wait_and_work

    def _then_save(self, trainer: Any) -> Callable[..., None]:
        """Save a step once it is logged and evaluated, as what comes of that belongs to it. Collective."""
        # Called twice where an epoch ends early.
        log_save_evaluate = self._once_staged(trainer._maybe_log_save_evaluate)

        def and_save(*args: Any, **kwargs: Any) -> None:
            if self._is_over:  # all that belongs to the last step was done by the run before
                return
            log_save_evaluate(*args, **kwargs)
            if self._is_due and (self._epoch_has_ended or not has_ended(trainer)):  # then it is called once more
                self._is_due, step = False, trainer.state.global_step
                assert self.checkpointer is not None and self._state is not None
                if step != self.checkpointer.last_step:  # the Trainer saves a step again where it ends an epoch early
                    self._state.save(self.checkpointer.adapting, step)

        return and_save

    def _unless_over(self, trainer: Any) -> Callable[..., Any]:
        """Give batches, but none to a training that had made all its steps: the Trainer would make one more."""
        batches = trainer.get_batch_samples

        def get(*args: Any, **kwargs: Any) -> Any:
            if not self._is_over:
                return batches(*args, **kwargs)
            trainer.control.should_training_stop = True
            return [], None

        return get


def _begin_afresh_or_resume(trainer: Any) -> None:
    """Let the next call of `train` resume from what is on disk, if there is anything; by itself it would refuse to.

    Not collective. Nothing stays replaced once it is called.
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
    """Let a Trainer save in memory, and start from there, as `MLFlashCallback` does.

    Not collective.

    Args:
        trainer: of Hugging Face's Trainer or a class made from it.
        save_mem_interval: a checkpoint in memory every so many steps. Default: whenever the Trainer saves, see
            `MLFlashCallback`.
        directory, skip_every_n_steps, enabled, in_background, settings: see `MLFlashCallback`.

    Returns:
        The same trainer.

    Raises:
        ConfigError: an interval makes no sense, or the Trainer has such a callback already.
    """
    callback = MLFlashCallback(save_mem_interval, skip_every_n_steps, enabled, directory, in_background, **settings)
    trainer.add_callback(callback)
    callback.attach(trainer)
    return trainer
