"""What a Trainer holds of a training ↔ a state for the slots.

Model and optimizer are taken as they are in use: whole where each rank has all of it (DDP), as shards where they are
sharded (FSDP2), so that another number of ranks can go on. There is no pickle among it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Collection
from typing import Any

import torch
from accelerate.data_loader import get_sampler
from accelerate.optimizer import AcceleratedOptimizer
from torch.distributed.tensor import DTensor
from transformers.trainer import SCHEDULER_NAME
from transformers.trainer_callback import ExportableState

from mlflash import Checkpointer, rng
from mlflash.checkpointer.for_adapters import Adapting
from mlflash.errors import StateError

from ..fsdp.states import init_optim_state
from ..replacing import replaced

ALIKE = ("model.*", "optimizer.*")
"""Names of what all ranks of DDP have alike in a `State`."""
_SUMS = ("_tr_loss", "_globalstep_last_logged", "current_flos")
"""Of a Trainer: what it has summed up on this rank since it logged. Its own checkpoints do not have these."""


@dataclasses.dataclass(frozen=True)
class Found:
    """A checkpoint of mlflash.

    Attributes:
        step: of it.
        text: its trainer_state.json.
        names: of its tensors.
    """

    step: int
    text: str
    names: frozenset[str]


class OfRank:
    """What each rank has its own of: random numbers, and losses that are not logged yet.

    Args:
        trainer: Hugging Face's.

    Attributes:
        together: loads something of it on all ranks, or on none; set where there is something to be loaded.
    """

    rank_private = True

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self.together: Callable[[Callable[[], None]], None] = lambda work: work()
        self._loaded: dict[str, Any] | None = None
        self._epoch: dict[str, Any] | None = None  # random numbers where it began: the order of its rows is of them
        self._dataloader: Any = None

    def state_dict(self) -> dict[str, Any]:
        """Read them. Not collective."""
        numbers = self._numbers()
        epoch = numbers if self._epoch is None or has_ended(self._trainer) else self._epoch
        # Before Transformers 5.5 the sum of losses is a variable of a method; the others say nothing without it.
        sums = {name: getattr(self._trainer, name) for name in _SUMS} if hasattr(self._trainer, "_tr_loss") else {}
        return {"numbers": numbers, "epoch": epoch, "sums": sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep them until the training comes to where they belong. Not collective."""
        self._loaded = state

    def begin(self) -> None:
        """Begin a training: the next loss that it logs is that of the same steps as without the interruption."""
        self._epoch, trainer = None, self._trainer
        if self._loaded is None or not self._loaded["sums"] or not hasattr(trainer, "_tr_loss"):
            return
        for name, value in self._loaded["sums"].items():
            setattr(trainer, name, value.to(trainer.args.device) if isinstance(value, torch.Tensor) else value)
        # At the end it is divided by the steps of this run only.
        trainer._total_loss_scalar -= float(trainer._tr_loss)

    def begin_epoch(self, dataloader: Any) -> None:
        """Note the random numbers that an epoch begins with; the first time after a load set them as they were then.

        Collective over all ranks, that time.
        """
        self._dataloader = dataloader
        if self._epoch is None:
            self.together(self._begin_as_before)
        self._epoch = self._numbers()

    def _begin_as_before(self) -> None:
        if self._loaded is not None:
            rng().load_state_dict(self._loaded["epoch"]["rng"])
            for generator, state in zip(
                _generators(self._dataloader), self._loaded["epoch"]["generators"], strict=False
            ):
                generator.set_state(state)

    def end_skipping(self) -> None:
        """Set the random numbers as they were when the step had ended: the rows before it are skipped now.

        Collective over all ranks.
        """

        def set_numbers() -> None:
            if self._loaded is not None:
                rng().load_state_dict(self._loaded["numbers"]["rng"])

        self.together(set_numbers)

    def _numbers(self) -> dict[str, Any]:
        return {"rng": rng().state_dict(), "generators": [one.get_state() for one in _generators(self._dataloader)]}


class State:
    """All that a training goes on from.

    Args:
        trainer: Hugging Face's, which trains.

    Attributes:
        whole: what a checkpoint on disk has, if it has an optimizer: a file's name, or a pattern.
        of_rank: what each rank has its own of.
    """

    whole = SCHEDULER_NAME

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self.of_rank = OfRank(trainer)

    @property
    def settings(self) -> dict[str, Any]:
        """Of a Checkpointer: what all ranks hold alike, where they do; that is stored once per node."""
        is_ddp = self._trainer.accelerator.distributed_type.name.startswith("MULTI_")
        return {"replicated": dict.fromkeys(ALIKE, True)} if is_ddp and not self._is_sharded else {}

    @property
    def _is_sharded(self) -> bool:
        return any(isinstance(param, DTensor) for param in self._trainer.model.parameters())

    def save(self, adapting: Adapting, step: int) -> None:
        """Save a step. Collective over all ranks, see `Adapting.save_or_warn`."""
        optimizer = self._trainer.optimizer
        own = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
        adapting.save_or_warn(step, self, [own])

    def close(self) -> None:
        """Leave the trainer alone. Not collective."""

    def state_dict(self) -> dict[str, Any]:
        """Take what is in use; no tensor is copied. Not collective.

        Raises:
            StateError: a callback's state, or what it has logged, is nothing that JSON can hold.
        """
        trainer = self._trainer
        return {
            "model": trainer.model.state_dict(),
            "optimizer": trainer.optimizer.state_dict(),
            "scheduler": trainer.lr_scheduler,
            "scaler": getattr(trainer.accelerator, "scaler", None),
            **self._besides(),
        }

    def _besides(self) -> dict[str, Any]:
        return {"trainer": _text(self._trainer), "rank": self.of_rank}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError("use `loading` instead")

    def loading(self, checkpointer: Checkpointer, found: Found) -> contextlib.AbstractContextManager[object]:
        """Let the trainer load from memory what it would load from a folder.

        Args:
            checkpointer: has it.
            found: what.
        """
        load = self._load
        self.of_rank.together = functools.partial(checkpointer.adapting.load_together, found.step)
        return replaced(
            self._trainer,
            _load_from_checkpoint=lambda *args: None,  # the model comes with the optimizer, when there is one
            _load_optimizer_and_scheduler=lambda *args: load(checkpointer, found.step, found.names),
            _load_scaler=lambda *args: None,
            _load_rng_state=lambda *args: self.of_rank.end_skipping(),
        )

    def _load(self, checkpointer: Checkpointer, step: int, names: Collection[str]) -> None:
        """Load a step into the trainer, once it has model, optimizer and schedule. Collective over all ranks."""
        trainer, together = self._trainer, checkpointer.adapting.load_together
        optimizer, is_sharded = trainer.optimizer, self._is_sharded
        # A new optimizer has no tensors yet; where they are sharded they must say which shard is wanted.
        model, values = together(step, lambda: (
            trainer.model.state_dict(), _with_state(optimizer, names) if is_sharded else None), anew=True)  # fmt: skip
        state = {
            "model": model,
            "optimizer": values if is_sharded else optimizer,
            "scheduler": trainer.lr_scheduler,
            "scaler": getattr(trainer.accelerator, "scaler", None),
            "trainer": "",
            "rank": self.of_rank,
        }
        checkpointer.restore(state, step)

        def put() -> None:
            trainer.model.load_state_dict(model)  # for what is none of its tensors
            if is_sharded:
                optimizer.load_state_dict(state["optimizer"])

        together(step, put)


def has_ended(trainer: Any) -> bool:
    """Whether a trainer is between two epochs."""
    return float(trainer.state.epoch or 0).is_integer()


def _generators(dataloader: Any) -> list[torch.Generator]:
    """The random generators that a data loader and its sampler have of their own."""
    if dataloader is None:
        return []
    # Where accelerate shards the batches, the sampler is out of its reach, but not what keeps it alike on all ranks.
    owners = ((dataloader, "generator"), (get_sampler(dataloader), "generator"), (dataloader, "synchronized_generator"))
    found = [getattr(one, name, None) for one, name in owners]
    return [one for one in found if isinstance(one, torch.Generator)]


def _with_state(optimizer: Any, names: Collection[str]) -> dict[str, Any]:
    """The state of an optimizer that has made no step, for those parameters that had one in the checkpoint."""
    init_optim_state(getattr(optimizer, "optimizer", optimizer), skip_empty_param=False)
    state: dict[str, Any] = optimizer.state_dict()
    known = {name.split(".")[2] for name in names if name.startswith("optimizer.state.")}
    return {**state, "state": {key: value for key, value in state["state"].items() if str(key) in known}}


def _text(trainer: Any) -> str:
    """The trainer_state.json that a Trainer would write, with the state of its callbacks."""
    exported = [*trainer.callback_handler.callbacks, trainer.control]
    callbacks = [one for one in exported if isinstance(one, ExportableState)]
    try:
        return json.dumps(dataclasses.asdict(dataclasses.replace(trainer.state, stateful_callbacks=callbacks)))
    except (TypeError, ValueError) as error:
        raise StateError(
            f"the state of the Trainer or of a callback cannot be written as JSON: {error}", tensor="trainer"
        ) from error
