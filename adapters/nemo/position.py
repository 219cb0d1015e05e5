"""Where a training of NeMo is, but for what NeMo saves: random numbers, and each rank's data loader.

A checkpoint in memory is made when all is done that belongs to a step, later than any hook of Lightning's; after the
last step of an epoch, when all is done that belongs to the epoch. Its loops expect something to be left to do. They are
right where a training's own hook saves below the base.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.tensor_parallel import get_cuda_rng_tracker

from mlflash import rng


def position(checkpoint: dict[str, Any], epoch_has_ended: bool | None) -> dict[str, Any]:
    """Take this rank's position; its data loaders' states are taken out of the checkpoint. Not collective."""
    loaders = checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", [])
    return {
        "rng": rng().state_dict(),
        "tracker": get_cuda_rng_tracker().get_states(),
        "epoch has ended": epoch_has_ended,
        "loaders": [] if epoch_has_ended else loaders,  # of an epoch that has ended nothing is left to be given
    }


def go_on(trainer: Any, checkpoint: dict[str, Any], at: dict[str, Any]) -> Callable[[], None]:
    """Let Lightning's fit loop, before it is restored from a checkpoint, go on from a `position`. Not collective.

    Returns:
        Undoes it, where no step was made.
    """
    loop, has_ended = trainer.fit_loop, at["epoch has ended"]
    inner = loop.epoch_loop
    if at["loaders"]:
        checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = at["loaders"]

    def set_numbers() -> None:
        rng().load_state_dict(at["rng"])
        get_cuda_rng_tracker().set_states(at["tracker"])

    def reset() -> None:
        del inner.reset
        if has_ended:
            loop._restarting = inner.restarting = False
        inner.reset()

    def advance(fetcher: Any) -> None:
        del inner.advance
        if has_ended is not None:
            loop._restarting = inner.restarting = False
        if not has_ended:  # data loaders have drawn some for what is left of the epoch
            set_numbers()
        inner.advance(fetcher)

    def begin_epoch() -> None:
        del loop.on_advance_start
        set_numbers()  # data loaders have drawn some when they were set up; those of the new epoch come now
        loop.on_advance_start()

    if has_ended:
        loop.on_advance_start = begin_epoch
    inner.reset, inner.advance = reset, advance

    def undo() -> None:
        for owner, name in ((inner, "reset"), (inner, "advance"), (loop, "on_advance_start")):
            owner.__dict__.pop(name, None)

    return undo
