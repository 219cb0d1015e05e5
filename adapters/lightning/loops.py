"""Lightning's loops: where a step ends, later than any of its hooks is called; and how to go on behind one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..replacing import replaced


def at_step_ends(trainer: Any, end_step: Callable[[bool], None]) -> Callable[[], None]:
    """Let Lightning's fit loop call a function when all is done that belongs to a batch.

    Not collective. After the last batch of an epoch it is called when all is done that belongs to the epoch, too;
    where training stops within an epoch, once more for the last batch.

    Args:
        trainer: Lightning's.
        end_step: called with whether an epoch has ended.

    Returns:
        Undoes it.
    """
    loop = trainer.fit_loop
    inner = loop.epoch_loop
    end_epoch, end_batch = loop.on_advance_end, inner.on_advance_end

    def on_epoch_end() -> None:
        end_epoch()
        end_step(inner._num_ready_batches_reached())

    def on_batch_end(*args: Any) -> None:
        end_batch(*args)
        if not inner._num_ready_batches_reached():  # else the end of the epoch follows
            end_step(False)

    undo = replaced(loop, on_advance_end=on_epoch_end)
    undo.callback(replaced(inner, on_advance_end=on_batch_end).close)
    return undo.close


def before_first_step(loop: Any, has_ended: bool | None, prepare: Callable[[Any], None]) -> Callable[[], None]:
    """Let Lightning's fit loop, restored from what was saved behind a step, look for nothing of that step.

    Not collective.

    Args:
        loop: the trainer's fit loop.
        has_ended: whether an epoch had ended with the step; None: it was saved within the step, in a hook, and the loop
            goes on there by itself.
        prepare: called before the first step, with the data fetcher.

    Returns:
        Undoes it, where no step was made.
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

    def undo() -> None:
        undo_reset.close()
        undo_advance.close()

    return undo
