"""Convert what a Lightning strategy holds of a training to a state for the slots.

If each rank holds everything (one device, DDP), the state is the checkpoint that Lightning would write. If the model is
sharded (ModelParallelStrategy, FSDPStrategy), the state has the shards of model and optimizers, so that another number
of ranks can continue.
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
from ..pickles import apart, together
from ..replacing import replaced
from .loops import position

ALIKE = ("checkpoint.tree.state_dict.*", "checkpoint.tree.optimizer_states.*")
"""Names of the entries of a `Whole` state that all ranks of DDP hold alike."""


class _State:
    """The base of both kinds of state."""

    def __init__(self, trainer: Any, epoch_has_ended: bool):
        self._trainer, self._epoch_has_ended = trainer, epoch_has_ended

    def _read(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Give what Lightning would write to disk, and the position, see `loops`."""
        checkpoint: dict[str, Any] = self._trainer._checkpoint_connector.dump_checkpoint(False)
        at = position(checkpoint, self._epoch_has_ended)
        return checkpoint, {"rank": self._trainer.global_rank, **at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError("call `load` instead")


class Whole(_State):
    """The state of a training that each rank holds as a whole."""

    def state_dict(self) -> dict[str, Any]:
        checkpoint, at = self._read()
        return {"checkpoint": apart(checkpoint), "position": apart(at)}

    @staticmethod
    def load(checkpointer: Checkpointer, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Load a step on any number of ranks: what Lightning continues from, and the position. Collective over all."""
        taken = _Taken()
        checkpointer.restore(taken, step)
        if "checkpoint" not in taken.state:
            raise StructureMismatch("this checkpoint was saved in shards: use a strategy that shards the model",
                                    step=step, expected="a whole checkpoint", found=sorted(taken.state))  # fmt: skip
        return checkpointer.adapting.load_together(
            step, lambda: (together(taken.state["checkpoint"]), together(taken.state["position"])), anew=True
        )


class _Taken:
    """Takes a state that has no objects yet. `restore` gives it to any number of ranks, which `load` does not."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Sharded(_State):
    """The state of a training whose model is sharded over the ranks."""

    def state_dict(self) -> dict[str, Any]:
        with self._shards_only():
            checkpoint, at = self._read()
        parts = {"model": checkpoint.pop("state_dict"), "optimizers": checkpoint.pop("optimizer_states")}
        pickled, tensors = pickles.dump((checkpoint, at))
        file = io.BytesIO()
        torch.save([tensor.detach().cpu() for tensor in tensors], file)
        return {**parts, "pickled": pickled, "tensors": file.getvalue()}

    def load(self, checkpointer: Checkpointer, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Load a step into model and optimizers. Collective over all ranks."""
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
        """Let the strategy give its live shards. Without this it would copy them, or the whole model, to the CPU."""
        strategy = self._trainer.strategy

        def optimizer_state(optimizer: Any) -> dict[str, Any]:
            return dict(get_optimizer_state_dict(strategy.model, getattr(optimizer, "_optimizer", optimizer)))

        return replaced(
            strategy,
            lightning_module_state_dict=lambda: get_model_state_dict(strategy.model),
            optimizer_state=optimizer_state,
        )


def state_of(trainer: Any, epoch_has_ended: bool = False) -> Whole | Sharded:
    """Give the state of a trainer. Its kind depends on the strategy."""
    kind = Sharded if trainer.strategy.restore_checkpoint_after_setup else Whole
    return kind(trainer, epoch_has_ended)
