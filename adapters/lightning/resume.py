"""What Lightning does not restore by itself: random numbers, and where data loaders were.

Its loops count what they have done, and can go on from a checkpoint that was made within a step, in a hook. Ours are
made after all that belongs to a step, or to an epoch if the step was its last one: so nothing of it is left to do.
Lightning would look for what is left, and would start data loaders before their samplers know the epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlflash import rng

from .loops import before_first_step


def position(trainer: Any, checkpoint: dict[str, Any], epoch_has_ended: bool) -> dict[str, Any]:
    """Take out of a checkpoint of Lightning where its data loaders are; add random numbers. Not collective."""
    loaders = checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", [])
    # At an epoch's end nothing of it is left to be given.
    return {"rank": trainer.global_rank, "rng": rng().state_dict(), "epoch has ended": epoch_has_ended,
            "loaders": [] if epoch_has_ended else loaders}  # fmt: skip


def go_on(loop: Any, at: dict[str, Any]) -> Callable[[], None]:
    """Let the first step of Lightning's fit loop go on from a `position`. Not collective.

    Returns:
        Undoes it, where no step was made.
    """
    has_ended = at["epoch has ended"]
    is_own = at["rank"] == loop.trainer.global_rank  # a rank that was not there before goes on with its own numbers

    def prepare(fetcher: Any) -> None:
        if has_ended and is_own:  # then data loaders draw random numbers for the new epoch
            rng().load_state_dict(at["rng"])
        loop._combined_loader._load_state_dicts(at["loaders"])
        iter(fetcher)
        fetcher.fetched += loop.epoch_loop.batch_progress.current.ready
        if not has_ended and is_own:
            rng().load_state_dict(at["rng"])

    return before_first_step(loop, has_ended, prepare)
