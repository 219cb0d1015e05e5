"""The parts of a NeMo training's position that NeMo does not save: random numbers, and each rank's data loader.

mlflash saves when everything of a step is done, which is after all hooks of Lightning, and for the last step of an
epoch when everything of the epoch is done. Lightning's loops expect that a part of the step is left to do. That is only
true if a hook of yours saves below the base.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.tensor_parallel import get_cuda_rng_tracker

from mlflash import rng

from ..lightning.loops import before_first_step
from ..replacing import replaced


def position(checkpoint: dict[str, Any], epoch_has_ended: bool | None) -> dict[str, Any]:
    """Give this rank's position, and take the states of its data loaders out of the checkpoint. Not collective."""
    loaders = checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", [])
    return {
        "rng": rng().state_dict(),
        "tracker": get_cuda_rng_tracker().get_states(),
        "epoch has ended": epoch_has_ended,
        "loaders": [] if epoch_has_ended else loaders,  # an epoch that has ended has no rows left
    }


def go_on(trainer: Any, checkpoint: dict[str, Any], at: dict[str, Any]) -> Callable[[], None]:
    """Let Lightning's fit loop continue from a `position`. Call it before the loop is restored. Not collective.

    Returns:
        A function that undoes it if no step was made.
    """
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
    let_steps_be = before_first_step(loop, has_ended, prepare)

    def undo_all() -> None:
        undo.close()
        let_steps_be()

    return undo_all
