"""What a Lightning strategy holds of a training ↔ a state for the slots.

Where each rank holds all of it (one device, DDP), the checkpoint that Lightning would write is taken as it is. Where
the model is sharded (ModelParallelStrategy, FSDPStrategy), model and optimizers are taken as the shards they are, so
that another number of ranks can go on.
"""

from __future__ import annotations

import contextlib
import io
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from mlflash import Checkpointer
from mlflash.errors import StructureMismatch

from .. import pickles
from ..anything import apart, together
from ..replacing import replaced
from .resume import position

ALIKE = ("checkpoint.tree.state_dict.*", "checkpoint.tree.optimizer_states.*")
"""Names of what all ranks of DDP have alike in a `Whole` state."""


class _State:
    """What both kinds of state have: where they are read from.

    Args:
        trainer: Lightning's.
        epoch_has_ended: whether the step that is saved was the last one of an epoch.
    """

    def __init__(self, trainer: Any, epoch_has_ended: bool):
        self._trainer, self._epoch_has_ended = trainer, epoch_has_ended

    def _read(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What Lightning would write to disk, and where it is."""
        checkpoint: dict[str, Any] = self._trainer._checkpoint_connector.dump_checkpoint(False)
        return checkpoint, position(self._trainer, checkpoint, self._epoch_has_ended)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError("call `load` instead")


class Whole(_State):
    """The state of a training of which each rank holds all."""

    def state_dict(self) -> dict[str, Any]:
        """Take what Lightning saves; the tensors are those in use."""
        checkpoint, at = self._read()
        return {"checkpoint": apart(checkpoint), "position": apart(at)}

    def load(self, checkpointer: Checkpointer, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Load a step. Collective over all ranks.

        Returns:
            The checkpoint that Lightning goes on from, and the position, see `resume`.
        """
        return load_whole(checkpointer, step)


def load_whole(checkpointer: Checkpointer, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Load what `Whole` has saved, on any number of ranks. Collective over all ranks.

    Returns:
        The checkpoint that Lightning goes on from, and the position, see `resume`.

    Raises:
        StructureMismatch: the model was sharded when it was saved.
    """
    taken = _Taken()
    checkpointer.restore(taken, step)
    if "checkpoint" not in taken.state:
        raise StructureMismatch("this checkpoint was saved in shards: use a strategy that shards the model", step=step,
                                expected="a whole checkpoint", found=sorted(taken.state))  # fmt: skip
    return checkpointer.adapting.load_together(
        step, lambda: (together(taken.state["checkpoint"]), together(taken.state["position"])), anew=True
    )


class _Taken:
    """Stands for a state that is not there yet; unlike `load`, `restore` gives it to any number of ranks."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Sharded(_State):
    """The state of a training whose model is sharded over the ranks."""

    def state_dict(self) -> dict[str, Any]:
        """Take the shards in use, and what else Lightning saves."""
        with self._shards_only():
            checkpoint, at = self._read()
        parts = {"model": checkpoint.pop("state_dict"), "optimizers": checkpoint.pop("optimizer_states")}
        pickled, tensors = pickles.dump((checkpoint, at))
        file = io.BytesIO()
        torch.save([tensor.detach().cpu() for tensor in tensors], file)
        return {**parts, "pickled": pickled, "tensors": file.getvalue()}

    def load(self, checkpointer: Checkpointer, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Load a step into model and optimizers. Collective over all ranks.

        Returns:
            The checkpoint that Lightning goes on from, and the position, see `resume`.
        """
        strategy, load_together = self._trainer.strategy, checkpointer.adapting.load_together

        def shards() -> dict[str, Any]:
            optimizers = [get_optimizer_state_dict(strategy.model, optimizer) for optimizer in strategy.optimizers]
            return {"model": get_model_state_dict(strategy.model), "optimizers": optimizers}

        state = {**load_together(step, shards, anew=True), "pickled": b"", "tensors": b""}
        checkpointer.restore(state, step)

        def put() -> Any:
            set_model_state_dict(strategy.model, state["model"])  # FSDP1 gave copies
            for optimizer, values in zip(strategy.optimizers, state["optimizers"], strict=True):
                set_optimizer_state_dict(strategy.model, optimizer, values)
            tensors = torch.load(io.BytesIO(state["tensors"]), weights_only=True)
            return pickles.load(state["pickled"], tensors)

        checkpoint, at = load_together(step, put)
        return {**checkpoint, "state_dict": {}, "optimizer_states": []}, at

    def _shards_only(self) -> contextlib.ExitStack:
        """Let the strategy give its shards; by itself it would bring them, or all of the model, to the CPU."""
        strategy = self._trainer.strategy

        def optimizer_state(optimizer: Any) -> dict[str, Any]:
            return dict(get_optimizer_state_dict(strategy.model, getattr(optimizer, "_optimizer", optimizer)))

        return replaced(
            strategy,
            lightning_module_state_dict=lambda: get_model_state_dict(strategy.model),
            optimizer_state=optimizer_state,
        )


def state_of(trainer: Any, epoch_has_ended: bool = False) -> Whole | Sharded:
    """The state of a trainer, by its strategy."""
    kind = Sharded if trainer.strategy.restore_checkpoint_after_setup else Whole
    return kind(trainer, epoch_has_ended)
