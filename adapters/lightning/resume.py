"""Restore what Lightning does not restore itself: random numbers and the positions of data loaders.

Lightning's loops count what they have done, and can continue from a checkpoint that was made within a step, in a hook.
mlflash saves when everything of a step is done, and for the last step of an epoch everything of the epoch. So nothing
of the step is left to do. Lightning would look for the rest of it, and would start data loaders before their samplers
know the epoch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mlflash import rng

from ..replacing import replaced
from .loops import before_first_step

Together = Callable[[Callable[[], Any]], Any]
"""`Adapting.load_together` for a step."""
_RESTORES = ("restore_model", "restore_datamodule", "restore_callbacks", "restore_training_state")


def position(trainer: Any, checkpoint: dict[str, Any], epoch_has_ended: bool) -> dict[str, Any]:
    """Take the positions of data loaders out of a checkpoint of Lightning, and add random numbers. Not collective."""
    loaders = checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", [])
    # At the end of an epoch it has no rows left.
    return {"rank": trainer.global_rank, "rng": rng().state_dict(), "epoch has ended": epoch_has_ended,
            "loaders": [] if epoch_has_ended else loaders}  # fmt: skip


def restore_together(connector: Any, together: Callable[[Callable[[], Any]], Any]) -> Callable[[], None]:
    """Let Lightning put a checkpoint into model, callbacks, optimizers and loops on all ranks, or on none.

    This call is not collective, but the four calls in which Lightning does so are.

    Args:
        connector: the trainer's `_checkpoint_connector`.
        together: makes one of these calls on all ranks, or on none.

    Returns:
        A function that undoes it.
    """
    steps = {name: functools.partial(together, getattr(connector, name)) for name in _RESTORES}
    return replaced(connector, **steps).close


def go_on(loop: Any, at: dict[str, Any], together: Together) -> Callable[[], None]:
    """Let the first step of Lightning's fit loop continue from a `position`. Not collective, but the first step is.

    Returns:
        A function that undoes it if no step was made.
    """
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
