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

from ..lightning.loops import before_first_step
from ..replacing import replaced


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
    if at["loaders"]:
        checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = at["loaders"]

    def set_numbers() -> None:
        rng().load_state_dict(at["rng"])
        get_cuda_rng_tracker().set_states(at["tracker"])

    def prepare(fetcher: Any) -> None:
        if not has_ended:  # data loaders have drawn some for what is left of the epoch
            set_numbers()

    def begin_epoch() -> None:
        undo.close()
        set_numbers()  # data loaders have drawn some when they were set up; those of the new epoch come now
        loop.on_advance_start()

    undo = replaced(loop, **({"on_advance_start": begin_epoch} if has_ended else {}))
    let_steps_be = before_first_step(loop, has_ended, prepare)

    def undo_all() -> None:
        undo.close()
        let_steps_be()

    return undo_all
