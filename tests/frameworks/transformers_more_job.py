"""Trainings of Hugging Face's Trainer with more than the contract asks for; `variant` says what."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import transformers_job
from job import Run
from records import note
from torch.distributed.tensor import DTensor
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers_job import make_trainer

from mlflash.adapters.transformers import MLFlashCallback, TrainerWrapper
from mlflash.errors import ConfigError

PATCHED = {"train", "_maybe_log_save_evaluate", "_load_best_model", "_load_from_checkpoint",
           "_load_optimizer_and_scheduler", "_load_scaler", "_load_rng_state", "get_batch_samples"}  # fmt: skip


class Counts(TrainerCallback, ExportableState):
    """A callback with a state."""

    def __init__(self, steps: int = 0):
        self.steps = steps

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.steps += 1

    def state(self) -> dict[str, Any]:
        """Its state."""
        return {"args": {}, "attributes": {"steps": self.steps}}


class NotesWhole(TrainerCallback):
    """Notes what model and optimizer hold together on all ranks, when training begins and after a step."""

    def __init__(self, run: Run, after: int):
        self.run, self.after, self.trainer = run, after, None

    def on_epoch_begin(self, args: Any, state: Any, *more: Any, **kwargs: Any) -> None:
        self._note(state.global_step)

    def on_step_end(self, args: Any, state: Any, *more: Any, **kwargs: Any) -> None:
        if state.global_step == self.after:
            self._note(state.global_step)

    def _note(self, step: int) -> None:
        assert self.trainer is not None
        digest = hashlib.sha256()
        for value in [*self.trainer.model.state_dict().values(), *_moments(self.trainer.optimizer)]:
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            digest.update(whole.contiguous().view(torch.uint8).numpy().tobytes())
        note("whole", run=self.run.name, step=step, digest=digest.hexdigest())


def _moments(optimizer: Any) -> list[torch.Tensor]:
    states = optimizer.state_dict()["state"]
    return [states[key][name] for key in sorted(states) for name in ("exp_avg", "exp_avg_sq")]


class NotesSlots(TrainerCallback):
    """Notes the bytes of this rank's slots of each kind, at the end."""

    def __init__(self, run: Run, flash: MLFlashCallback):
        self.run, self.flash = run, flash

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        assert self.flash.checkpointer is not None
        self.flash.checkpointer.wait()
        slots = self.flash.checkpointer.report()["slots"]
        note("slots", run=self.run.name, slots={slot["what"]: slot["nbytes"] for slot in slots})


def trained(run: Run, resume: Any = None, callbacks: tuple[Any, ...] = (), before: Callable[[Any], None] | None = None,
            **arguments: Any) -> None:  # fmt: skip
    """Train, and note how it ends; None as ``resume``: the newest there is, unless mlflash is off."""
    flash = MLFlashCallback(run.every, run.skip, run.enabled, **run.checkpointing)
    slots = [NotesSlots(run, flash)] if run.variant == "slots" else []
    trainer = make_trainer(run, [*callbacks, flash, *slots], **arguments)
    if before is not None:
        before(trainer)
    trainer.train(run.enabled if resume is None else resume)
    run.end(trainer.model, [trainer.optimizer])
    state = dataclasses.asdict(trainer.state)
    states = {type(one).__name__: one.state() for one in trainer.callback_handler.callbacks
              if isinstance(one, ExportableState)}  # fmt: skip
    note("state", run=run.name, state=state, callbacks=states)


def history(run: Run, by: str) -> None:
    """With logs, evaluations and callbacks that have a state."""
    trained(
        run, callbacks=(Counts(), EarlyStoppingCallback(9)), logging_strategy=by, logging_steps=3, eval_strategy=by,
        eval_steps=2, metric_for_best_model="eval_loss", greater_is_better=False,
        restore_callback_states_from_checkpoint=True,
    )  # fmt: skip


def wrapped(run: Run) -> None:
    """By the wrapper, with nothing on disk."""
    plain = make_trainer(run)
    trainer = TrainerWrapper(plain, 3, **run.checkpointing)
    assert trainer is plain and trainer.args.save_strategy == "no"
    trainer.train(resume_from_checkpoint=True)
    run.end(trainer.model, [trainer.optimizer])
    trainer.remove_callback(MLFlashCallback)
    failed = ""
    try:
        trainer.train(resume_from_checkpoint=True)
    except ValueError as error:  # as there is nothing on disk
        failed = str(error)
    note("removed", run=run.name, failed=failed, left=sorted(PATCHED & vars(trainer).keys()))


def refused(run: Run) -> None:
    """What there is no adapter for, or came too late, or twice."""

    def fails(trainer: Any, **attributes: Any) -> None:
        vars(trainer).update(attributes)
        _note_refusal(run, lambda: trainer.train(resume_from_checkpoint=True))

    def new() -> Any:
        return make_trainer(run, [MLFlashCallback(**run.checkpointing)])

    kind, state = new().accelerator.distributed_type, SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=1))
    fails(new(), is_fsdp_xla_enabled=True)
    fails(new(), accelerator=SimpleNamespace(distributed_type=kind, state=state))
    late = make_trainer(run)
    late.add_callback(MLFlashCallback(**run.checkpointing))
    _note_refusal(run, late.train)
    _note_refusal(run, lambda: TrainerWrapper(new(), **run.checkpointing))


def _note_refusal(run: Run, work: Callable[[], object]) -> None:
    try:
        work()
    except ConfigError as error:
        note("refused", run=run.name, why=str(error))


def whole(run: Run) -> None:
    """With all of the model and optimizer noted, for other numbers of ranks."""
    notes = NotesWhole(run, run.last)
    trained(dataclasses.replace(run, variant=run.variant.partition(" ")[0]), callbacks=(notes,),
            before=lambda trainer: setattr(notes, "trainer", trainer))  # fmt: skip


SCENES: dict[str, Callable[[Run], object]] = {
    "": trained,
    "history steps": lambda run: history(run, "steps"),
    "history epoch": lambda run: history(run, "epoch"),
    "path": lambda run: trained(run, str(run.directory / "checkpoint-3")),
    "afresh": lambda run: trained(run, False),
    "slots": trained,
    "wrapped": wrapped,
    "refused": refused,
    "ddp whole": whole,
    "fsdp2 whole": whole,
}


def train(run: Run) -> None:
    """Do a training."""
    SCENES.get(run.variant, transformers_job.train)(run)
