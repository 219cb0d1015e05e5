"""Convert what a Trainer holds of a training to a state for the slots.

The state has the live model and optimizer: whole if each rank has everything (DDP), or their shards (FSDP2), so that
another number of ranks can continue. It contains no pickle.
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
from transformers.utils import is_sagemaker_mp_enabled

from mlflash import Checkpointer, rng
from mlflash.checkpointer.adapter_api import AdapterAPI
from mlflash.errors import ConfigError, StateError

from ..fsdp.states import init_optim_state
from ..replacing import replaced

ALIKE = ("model.*", "optimizer.*")
"""Names of the entries of a `State` that all ranks of DDP hold alike."""
_SUMS = ("_tr_loss", "_globalstep_last_logged", "current_flos")
"""Attributes of a Trainer: what it has summed up on this rank since it logged. Its own checkpoints lack these."""


@dataclasses.dataclass(frozen=True)
class Found:
    """A checkpoint of mlflash."""

    step: int
    text: str  # its trainer_state.json
    names: frozenset[str]  # of its tensors


class OfRank:
    """What differs between ranks: random numbers, and losses that are not logged yet.

    Attributes:
        together: loads a part of this on all ranks, or on none. It is set if there is something to load.
    """

    rank_private = True

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self.together: Callable[[Callable[[], None]], None] = lambda work: work()
        self._loaded: dict[str, Any] | None = None
        self._epoch: dict[str, Any] | None = None  # state at its begin, which decides the order of its rows
        self._dataloader: Any = None

    def state_dict(self) -> dict[str, Any]:
        """Give this rank's state. Not collective."""
        numbers = self._numbers()
        epoch = numbers if self._epoch is None or has_ended(self._trainer) else self._epoch
        # Before Transformers 5.5 the sum of losses is a local variable. The other sums are useless without it.
        sums = {name: getattr(self._trainer, name) for name in _SUMS} if hasattr(self._trainer, "_tr_loss") else {}
        return {"numbers": numbers, "epoch": epoch, "sums": sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep a state until the training reaches the place where it belongs. Not collective."""
        self._loaded = state

    def begin(self) -> None:
        """Begin a training. Its next logged loss covers the same steps as without the interruption."""
        self._epoch, trainer = None, self._trainer
        if self._loaded is None or not self._loaded["sums"] or not hasattr(trainer, "_tr_loss"):
            return
        for name, value in self._loaded["sums"].items():
            setattr(trainer, name, value.to(trainer.args.device) if isinstance(value, torch.Tensor) else value)
        # At the end the Trainer divides this sum by the steps of this run only.
        trainer._total_loss_scalar -= float(trainer._tr_loss)

    def begin_epoch(self, dataloader: Any) -> None:
        """Note the random number state at the begin of an epoch. The first time after a load, first set the saved one.

        That first time it is collective over all ranks.
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
        """Set the random number state of the end of the saved step, now that the rows before it are skipped.

        Collective over all ranks.
        """

        def set_numbers() -> None:
            if self._loaded is not None:
                rng().load_state_dict(self._loaded["numbers"]["rng"])

        self.together(set_numbers)

    def _numbers(self) -> dict[str, Any]:
        generators = _generators(self._dataloader)
        return {"rng": rng().state_dict(), "generators": [generator.get_state() for generator in generators]}


class State:
    """Everything that a training continues from.

    Args:
        trainer: Hugging Face's Trainer.

    Attributes:
        whole: name or pattern of a file that a checkpoint on disk has if it contains an optimizer.
        of_rank: what differs between ranks.
    """

    whole = SCHEDULER_NAME

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self.of_rank = OfRank(trainer)

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of a Checkpointer: what all ranks of DDP hold alike, so that it is stored once per node."""
        is_ddp = self._trainer.accelerator.distributed_type.name.startswith("MULTI_")
        return {"replicated": dict.fromkeys(ALIKE, True)} if is_ddp and not self._is_sharded else {}

    @property
    def _is_sharded(self) -> bool:
        return any(isinstance(param, DTensor) for param in self._trainer.model.parameters())

    def save(self, adapting: AdapterAPI, step: int) -> None:
        """Save a step. Collective over all ranks, see `AdapterAPI.save_or_warn`."""
        optimizer = self._trainer.optimizer
        own = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
        adapting.save_or_warn(step, self, [own])

    def close(self) -> None:
        """Do nothing: the trainer was not changed. Not collective."""

    def state_dict(self) -> dict[str, Any]:
        """Give the live state; no tensor is copied. Not collective."""
        trainer = self._trainer
        return {"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict(), **self._stepped(),
                **self._besides()}  # fmt: skip

    def _stepped(self) -> dict[str, Any]:
        trainer = self._trainer
        return {"scheduler": trainer.lr_scheduler, "scaler": getattr(trainer.accelerator, "scaler", None)}

    def _besides(self) -> dict[str, Any]:
        return {"trainer": _text(self._trainer), "rank": self.of_rank}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError("use `loading` instead")

    def loading(self, checkpointer: Checkpointer, found: Found) -> contextlib.AbstractContextManager[object]:
        """Let the trainer load from memory instead of a folder."""
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
        """Load a step once the trainer has a model, an optimizer and a schedule. Collective over all ranks."""
        trainer, together = self._trainer, checkpointer.adapting.load_together
        optimizer, is_sharded = trainer.optimizer, self._is_sharded
        # A new optimizer has no tensors yet. If they are sharded, they must exist to say which shard to load.
        model, values = together(step, lambda: (
            trainer.model.state_dict(), _with_state(optimizer, names) if is_sharded else None), anew=True)  # fmt: skip
        state = {"model": model, "optimizer": values if is_sharded else optimizer, **self._stepped(), "trainer": "",
                 "rank": self.of_rank}  # fmt: skip
        checkpointer.restore(state, step)

        def put() -> None:
            trainer.model.load_state_dict(model)  # for the values that are not tensors
            if is_sharded:
                optimizer.load_state_dict(state["optimizer"])

        together(step, put)


def state_of(trainer: Any) -> State:
    """Give the state of a trainer. Its kind depends on what trains the model. Not collective."""
    kind = trainer.accelerator.distributed_type.name
    if getattr(trainer, "is_deepspeed_enabled", False):
        from .engines import StateOfEngine  # DeepSpeed is not always installed

        return StateOfEngine(trainer)
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is not None and getattr(plugin, "fsdp_version", 1) != 2:
        raise ConfigError("FSDP1 keeps its state in flat parameters, which this adapter cannot save: set fsdp_config="
                          "{'version': 2}, or for an older Trainer that does not know it the environment variable "
                          "FSDP_VERSION=2", found="fsdp_version 1")  # fmt: skip
    if kind in ("XLA", "MEGATRON_LM") or is_sagemaker_mp_enabled() or getattr(trainer, "is_fsdp_xla_enabled", False):
        raise ConfigError("this backend keeps its own state, and this adapter does not know it", found=kind)
    return State(trainer)


def has_ended(trainer: Any) -> bool:
    """Whether a trainer is between two epochs."""
    return float(trainer.state.epoch or 0).is_integer()


def _generators(dataloader: Any) -> list[torch.Generator]:
    """Give the random generators that belong to a data loader and its sampler."""
    if dataloader is None:
        return []
    # If accelerate shards the batches, the sampler cannot be found, but the generator that synchronizes it can.
    owners = ((dataloader, "generator"), (get_sampler(dataloader), "generator"), (dataloader, "synchronized_generator"))
    generators = [getattr(owner, name, None) for owner, name in owners]
    return [generator for generator in generators if isinstance(generator, torch.Generator)]


def _with_state(optimizer: Any, names: Collection[str]) -> dict[str, Any]:
    """Give a new optimizer's state, made for the parameters that have state in the checkpoint."""
    init_optim_state(getattr(optimizer, "optimizer", optimizer), skip_empty_param=False)
    state: dict[str, Any] = optimizer.state_dict()
    known = {name.split(".")[2] for name in names if name.startswith("optimizer.state.")}
    return {**state, "state": {key: value for key, value in state["state"].items() if str(key) in known}}


def _text(trainer: Any) -> str:
    """Give the trainer_state.json that a Trainer would write, with the state of its callbacks."""
    exported = [*trainer.callback_handler.callbacks, trainer.control]
    callbacks = [part for part in exported if isinstance(part, ExportableState)]
    try:
        return json.dumps(dataclasses.asdict(dataclasses.replace(trainer.state, stateful_callbacks=callbacks)))
    except (TypeError, ValueError) as error:
        raise StateError(
            f"the state of the Trainer or of a callback cannot be written as JSON: {error}", tensor="trainer"
        ) from error
