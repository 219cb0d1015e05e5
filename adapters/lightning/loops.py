"""Lightning's loops: find where a step ends, which is after all hooks of the step, and continue after one.

Lightning's loops count what they have done, and can continue from a checkpoint that was made within a step, in a hook.
mlflash saves when everything of a step is done, and for the last step of an epoch everything of the epoch. So nothing
of the step is left to do. Lightning would look for the rest of it, and would start data loaders before their samplers
know the epoch. It does not restore random numbers.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from mlflash import Checkpointer, rng

from .. import intervals
from ..replacing import replaced

Together = Callable[[Callable[[], Any]], Any]
"""`AdapterAPI.load_together` for a step."""
_RESTORES = ("restore_model", "restore_datamodule", "restore_callbacks", "restore_training_state")


class StepEnds:
    """The ends of the steps in Lightning's fit loop, and which of these steps are due in memory.

    A step ends when everything that belongs to its batch is done, and to its epoch if it is the last batch of that. If
    training stops within an epoch, there is another call for the last batch. When training has ended, there is one
    more.

    A step is due by the user's intervals. Without an interval it is due if Lightning itself has saved it, through a
    ModelCheckpoint or a call by hand. Such a save is remembered until the step ends. So a checkpoint within a step,
    while gradients are still accumulated, counts for the end of that step.

    Args:
        every, skip: the user's intervals, see `intervals.is_due`.
        end_step: called at each end, on all ranks. Its arguments say whether the step is another one than at the last
            call, whether it is due, and whether an epoch has ended.
        is_memory: whether a path means memory. A save to it is not Lightning's own.

    Attributes:
        replaced: undoes it when it is closed.
    """

    def __init__(
        self, trainer: Any, checkpointer: Checkpointer, every: int | None, skip: int | None,
        end_step: Callable[[bool, bool, bool], None], is_memory: Callable[[Any], bool] = lambda path: False,
    ):  # fmt: skip
        self._trainer, self._checkpointer, self._every, self._skip = trainer, checkpointer, every, skip
        self._end_step = end_step
        self._was_told = False
        self._step: int | None = None  # of the last call
        loop, wait_staged, save = trainer.fit_loop, checkpointer.adapting.wait_staged, trainer.save_checkpoint
        inner = loop.epoch_loop
        begin_epoch, end_epoch, end_batch, end_run = (
            loop.on_advance_start, loop.on_advance_end, inner.on_advance_end, loop.on_run_end
        )  # fmt: skip

        def on_epoch_start() -> None:
            wait_staged()  # callbacks may give the model other weights now, such as averages
            self._step = trainer.global_step if self._step is None else self._step
            begin_epoch()

        def on_epoch_end() -> None:
            end_epoch()
            self._end(inner._num_ready_batches_reached())

        def on_batch_end(*args: Any) -> None:
            end_batch(*args)
            if not inner._num_ready_batches_reached():  # otherwise the epoch ends next
                self._end(False)

        def on_run_end() -> None:
            wait_staged()  # as above
            end_run()
            self._end(inner._num_ready_batches_reached())
            wait_staged()

        def save_checkpoint(filepath: Any, *args: Any, **kwargs: Any) -> None:
            save(filepath, *args, **kwargs)
            self._was_told |= not is_memory(filepath)

        self.replaced = replaced(
            loop, on_advance_start=on_epoch_start, on_advance_end=on_epoch_end, on_run_end=on_run_end
        )
        self.replaced.enter_context(replaced(inner, on_advance_end=on_batch_end))
        self.replaced.enter_context(replaced(trainer, save_checkpoint=save_checkpoint))
        self._say_when()

    def _end(self, epoch_has_ended: bool) -> None:
        step = self._trainer.global_step
        is_new, self._step = self._step not in (None, step), step
        asked = is_new if self._every is not None else self._take() and step != self._checkpointer.last_step
        self._end_step(is_new, asked and intervals.is_due(step, self._every, self._skip), epoch_has_ended)

    def _take(self) -> bool:
        """Whether Lightning saved the step that has just ended. A second call for the same save gives False."""
        if not self._was_told or self._trainer.fit_loop.epoch_loop._should_accumulate():
            return False
        self._was_told = False
        return True

    def _say_when(self) -> None:
        named = ", ".join(type(callback).__name__ for callback in self._trainer.checkpoint_callbacks)
        why = ("the Trainer has no ModelCheckpoint, and nothing has called trainer.save_checkpoint so far. Set "
               "every_n_steps=... of the callback to save")  # fmt: skip
        intervals.say(self._checkpointer, self._every, self._skip, f"Lightning saves ({named})", "" if named else why)


def before_first_step(loop: Any, has_ended: bool | None, prepare: Callable[[Any], None]) -> contextlib.ExitStack:
    """Let Lightning's fit loop begin a new step after a restore, because the saved step was finished.

    Args:
        loop: the trainer's fit loop.
        has_ended: whether an epoch had ended with the saved step. None: the checkpoint was made within a step, in a
            hook, and the loop itself continues there.
        prepare: called before the first step, with the data fetcher.

    Returns:
        It undoes this if no step was made.
    """
    inner = loop.epoch_loop

    def reset() -> None:
        undo_reset.close()
        if has_ended:
            loop._restarting = inner.restarting = False
        inner.reset()

    def advance(fetcher: Any) -> None:
        undo_advance.close()
        if has_ended is not None:
            loop._restarting = inner.restarting = False
        prepare(fetcher)
        inner.advance(fetcher)

    undo_reset, undo_advance = replaced(inner, reset=reset), replaced(inner, advance=advance)
    undo = contextlib.ExitStack()
    undo.callback(undo_advance.close)
    undo.callback(undo_reset.close)
    return undo


def position(checkpoint: dict[str, Any], epoch_has_ended: bool | None) -> dict[str, Any]:
    """Take the positions of data loaders out of a checkpoint of Lightning, and add random numbers.

    An epoch that has ended has no rows left. None: the step has not ended yet.
    """
    loaders = checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", [])
    return {"rng": rng().state_dict(), "epoch has ended": epoch_has_ended,
            "loaders": [] if epoch_has_ended else loaders}  # fmt: skip


def restore_together(connector: Any, together: Together) -> contextlib.ExitStack:
    """Let Lightning put a checkpoint into model, callbacks, optimizers and loops on all ranks, or on none.

    This call is not collective, but the four calls in which Lightning does so are.
    """
    return replaced(connector, **{name: functools.partial(together, getattr(connector, name)) for name in _RESTORES})


def go_on(loop: Any, at: dict[str, Any], together: Together) -> contextlib.ExitStack:
    """Let the first step of Lightning's fit loop continue from a `position`. That step is collective."""
    has_ended = at["epoch has ended"]
    is_own = at["rank"] == loop.trainer.global_rank  # a new rank continues with its own random numbers

    def set_numbers(here: bool) -> None:
        if here and is_own:
            rng().load_state_dict(at["rng"])

    def load() -> None:
        set_numbers(has_ended)  # then data loaders draw random numbers for the new epoch
        loop._combined_loader._load_state_dicts(at["loaders"])

    def prepare(fetcher: Any) -> None:
        together(load)
        iter(fetcher)  # outside of `together`: it may take a while on some ranks
        fetcher.fetched += loop.epoch_loop.batch_progress.current.ready
        together(lambda: set_numbers(not has_ended))

    return before_first_step(loop, has_ended, prepare)
