"""Tiny models that Hugging Face's Trainer trains: GPT-2 by DDP or FSDP2, Llama by tensor parallelism."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from accelerate.state import DistributedType, PartialState
from job import Run
from records import note
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)  # fmt: skip
from transformers.trainer_callback import ExportableState

from mlflash.adapters.transformers import MLFlashCallback, TrainerWrapper
from mlflash.errors import ConfigError


class Rows(Dataset):
    """Rows of random tokens, always the same."""

    def __init__(self, count: int):
        self.tokens = torch.randint(0, 64, (count, 12), generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class NotingTrainer(Trainer):
    run: Run

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        self.run.loss(self.state.global_step + 1, loss.item())
        return loss


class Stop(TrainerCallback):
    """Ends a training before the step that its arguments, and so its schedule, are made for."""

    def __init__(self, last: int):
        self.last = last

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step >= self.last


class TinyForCausalLM(GPT2LMHeadModel):
    """Dropout, a weight that is both the first and the last, one too small to shard, and maybe one that is not used."""

    def __init__(self, config: GPT2Config, idle: bool, gains: int):
        super().__init__(config)
        self.gain = torch.nn.Parameter(torch.ones(gains))
        if idle:
            self.idle = torch.nn.Parameter(torch.ones(8))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> Any:
        output = super().forward(input_ids, labels=labels, **kwargs)
        output.loss = output.loss * self.gain.mean()
        return output


def tiny(idle: bool, gains: int = 1) -> TinyForCausalLM:
    torch.manual_seed(1)
    config = GPT2Config(vocab_size=2048, n_positions=12, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    return TinyForCausalLM(config, idle, gains)


def tiny_in_parts() -> LlamaForCausalLM:
    """Make a Llama with dropout, always the same, whose matrices are sharded over all ranks; its norms are whole."""
    from transformers.distributed import DistributedConfig  # older versions have none

    torch.manual_seed(1)
    whole = LlamaForCausalLM(LlamaConfig(
        vocab_size=2048, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=12, attention_dropout=0.1,
    ))  # fmt: skip
    return LlamaForCausalLM.from_pretrained(
        None, config=whole.config, state_dict=whole.state_dict(), distributed_config=DistributedConfig(tp_plan="auto")
    )


@contextlib.contextmanager
def shards_on_cpus() -> Iterator[None]:
    """Let accelerate take these processes for such with GPUs, as it shards (and asks no more) on these only."""
    with (
        mock.patch.object(PartialState, "_prepare_backend", lambda *_: ("gloo", DistributedType.MULTI_GPU)),
        mock.patch.dict(os.environ, ACCELERATE_TORCH_DEVICE="cpu"),
    ):
        yield


def deepspeed_config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }  # fmt: skip


class Asks(TrainerCallback):
    """Asks for a save after step 3, as a callback of a user's may; also for the end of the epoch."""

    def __init__(self, ends_epoch: bool):
        self.ends_epoch = ends_epoch

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save |= state.global_step == 3
        control.should_epoch_stop |= self.ends_epoch and state.global_step == 3


class Changes(TrainerCallback):
    """Gives the model other weights in a hook, as averages and clipping do, by a write that torch counts, or not."""

    def __init__(self, hook: str):
        setattr(self, hook, self._change)

    @torch.no_grad()
    def _change(self, args: Any, state: Any, *more: Any, model: Any, **kwargs: Any) -> None:
        weight = model.transformer.wte.weight
        (weight if state.global_step % 2 else weight.data).mul_(0.5)


SHARDED = ("fsdp2", "tp")
"""Variants whose parameters are DTensors."""
BEST = {"metric_for_best_model": "eval_loss", "greater_is_better": False, "eval_strategy": "steps"}
TRIGGERS: dict[str, dict[str, Any]] = {
    "": {},
    "steps": {"save_strategy": "steps", "save_steps": 2},
    "ratio": {"save_strategy": "steps", "save_steps": 0.1},
    "last step": {"save_strategy": "steps", "save_steps": 4},
    "epoch": {"save_strategy": "epoch"},
    "epoch ends early": {"save_strategy": "epoch"},
    "best": {"save_strategy": "best", "eval_steps": 1, **BEST},
    "best at end": {"save_strategy": "steps", "save_steps": 2, "eval_steps": 2, "load_best_model_at_end": True, **BEST},
    "best of epochs": {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "epoch",
                       "metric_for_best_model": "loss"},
    "model only": {"save_strategy": "steps", "save_steps": 2, "save_only_model": True},
    "callback": {"save_strategy": "no"},
    "no": {"save_strategy": "no"},
    "ends": {},
}  # fmt: skip


def make_trainer(run: Run, callbacks: list[Any] | None = None, **arguments: Any) -> NotingTrainer:
    """Make a trainer of four batches to the epoch, or of five, two to the step; each rank draws numbers of its own."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    given = {
        "output_dir": str(run.directory), "per_device_train_batch_size": 2, "max_steps": 20, "learning_rate": 1e-2,
        "save_strategy": "steps" if run.disk else "no", "save_steps": run.disk or 500, "logging_strategy": "no",
        "save_total_limit": run.kept or None, "gradient_accumulation_steps": 2 if run.variant == "accumulate" else 1,
        "data_seed": 5, "report_to": "none", "disable_tqdm": True, "use_cpu": run.variant not in SHARDED,
        "ddp_backend": "gloo", "dataloader_pin_memory": False,
    }  # fmt: skip
    sharded: dict[str, Any] = {}
    if run.variant == "fsdp2":
        sharded = {"fsdp": True, "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}
    if run.variant.startswith("zero"):
        import deepspeed_job  # noqa: F401  # what stands in for its compiler

        sharded = {"deepspeed": deepspeed_config(int(run.variant[-1]))}
    gains = size if run.variant == "zero3" else 1  # ZeRO-3 would fill up a share of one with what happens to be there
    model = tiny_in_parts() if run.variant == "tp" else tiny(not sharded, gains)
    with shards_on_cpus() if run.variant in SHARDED else contextlib.nullcontext():
        trainer = NotingTrainer(
            model=model, args=TrainingArguments(**{**given, **sharded, **arguments}),
            train_dataset=Rows(2 * size * (5 if run.variant == "accumulate" else 4)),
            eval_dataset=Rows(8), callbacks=[Stop(run.last), *(callbacks or [])],
        )  # fmt: skip
    trainer.run = run
    torch.manual_seed(100 + rank)
    return trainer


def assert_sharded(trainer: Any, is_sharded: bool) -> None:
    """Assert that the optimizer has its state in the same shards as the model its parameters; or both have it whole."""
    assert any(isinstance(param, DTensor) for param in trainer.model.parameters()) is is_sharded
    states = trainer.optimizer.state if is_sharded else {}
    assert all(_shard(state[name]) == _shard(param) for param, state in states.items()
               for name in ("exp_avg", "exp_avg_sq"))  # fmt: skip


def _shard(tensor: torch.Tensor) -> Any:
    is_sharded = isinstance(tensor, DTensor)
    return (tensor.placements, tensor.to_local().shape) if is_sharded else tensor.shape


def train(run: Run) -> None:
    if run.variant in SCENES:
        SCENES[run.variant](run)
        return
    flash = MLFlashCallback(run.interval, run.skip, run.enabled, **run.checkpointing)
    run.checkpointer = lambda: flash.checkpointer
    asks: list[Any] = [Asks(run.trigger != "callback")] if run.trigger in ("callback", "epoch ends early") else []
    if run.variant.startswith("changes "):
        asks.append(Changes(run.variant.removeprefix("changes ")))
    last: dict[str, Any] = {"max_steps": run.last} if run.trigger in ("last step", "ends") else {}
    if run.workers is not None:
        last = {"max_steps": -1, "num_train_epochs": 3, "dataloader_num_workers": run.workers}
    trainer = make_trainer(run, [*asks, flash], **TRIGGERS[run.trigger], **last)
    trainer.train(resume_from_checkpoint=True)
    assert_sharded(trainer, run.variant in SHARDED)
    engine = trainer.deepspeed
    run.end(trainer.model, [trainer.optimizer if engine is None else engine.optimizer])


# More than the contract asks for


PATCHED = {"train", "_maybe_log_save_evaluate", "_load_best_model", "_load_from_checkpoint",
           "_load_optimizer_and_scheduler", "_load_scaler", "_load_rng_state", "get_batch_samples"}  # fmt: skip


class Counts(TrainerCallback, ExportableState):
    def __init__(self, steps: int = 0):
        self.steps = steps

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.steps += 1

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"steps": self.steps}}


class NotesSlots(TrainerCallback):
    def __init__(self, run: Run, flash: MLFlashCallback):
        self.run, self.flash = run, flash

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        assert self.flash.checkpointer is not None
        self.flash.checkpointer.wait()
        slots = self.flash.checkpointer.report()["slots"]
        note("slots", run=self.run.name, slots={slot["what"]: slot["nbytes"] for slot in slots})


def trained(run: Run, resume: Any = None, callbacks: tuple[Any, ...] = (), **arguments: Any) -> None:
    """Train, and note how it ends; None as ``resume``: the newest there is, unless mlflash is off."""
    flash = MLFlashCallback(run.every, run.skip, run.enabled, **run.checkpointing)
    slots = [NotesSlots(run, flash)] if run.variant == "slots" else []
    trainer = make_trainer(run, [*callbacks, flash, *slots], **arguments)
    trainer.train(run.enabled if resume is None else resume)
    run.end(trainer.model, [trainer.optimizer])
    state = dataclasses.asdict(trainer.state)
    states = {type(one).__name__: one.state() for one in trainer.callback_handler.callbacks
              if isinstance(one, ExportableState)}  # fmt: skip
    note("state", run=run.name, state=state, callbacks=states)


def history(run: Run, by: str) -> None:
    trained(
        run, callbacks=(Counts(), EarlyStoppingCallback(9)), logging_strategy=by, logging_steps=3, eval_strategy=by,
        eval_steps=2, metric_for_best_model="eval_loss", greater_is_better=False,
        restore_callback_states_from_checkpoint=True,
    )  # fmt: skip


def wrapped(run: Run) -> None:
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


SCENES: dict[str, Callable[[Run], object]] = {
    "": trained,
    "history steps": lambda run: history(run, "steps"),
    "history epoch": lambda run: history(run, "epoch"),
    "path": lambda run: trained(run, str(run.directory / "checkpoint-3")),
    "afresh": lambda run: trained(run, False),
    "slots": trained,
    "wrapped": wrapped,
    "refused": refused,
}
