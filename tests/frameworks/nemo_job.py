"""A small GPT that NeMo trains with Megatron; other strategies, arguments and mistakes by the name of the variant."""

from __future__ import annotations

import dataclasses
import datetime
import os
from pathlib import Path
from typing import Any

import torch
from job import Run
from nemo_on_cpu import Data, Model, config, nl, on_cpu, pl, strategy
from records import note
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

# isort: split
from mlflash.adapters.nemo import MLFlashCheckpointCallback, wrap_trainer_and_auto_resume_with_mlflash

MEGATRON = {
    "tensor": {"tensor": 2},
    "tensor, reshardable": {"tensor": 2, "ckpt_optim_fully_reshardable": True},
    "async": {"ckpt_async_save": True},
    "reshardable": {"ckpt_optim_fully_reshardable": True},
}
TRIGGERS: dict[str, dict[str, Any]] = {
    "train steps": {"every_n_train_steps": 2},
    "time": {"train_time_interval": datetime.timedelta(microseconds=1)},
    "epochs": {"every_n_epochs": 1, "save_on_train_epoch_end": True},
}


def base(run: Run) -> str:
    """The base container: of one job a beginning of another's."""
    return f"{run.directory}-flash1"


class Note(pl.Callback):
    def __init__(self, run: Run):
        self.run = run

    def __getstate__(self) -> dict[str, Any]:
        """What NeMo writes of a callback into a context: no open Checkpointer, unless that is what is tried."""
        if self.run.variant == "context with what is open":
            return vars(self)
        return {"run": dataclasses.replace(self.run, checkpointer=lambda: None)}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.run.loss(trainer.global_step, outputs["loss"].item())
        if self.run.trigger == "by hand" and trainer.global_step == 3:
            trainer.save_checkpoint(f"{self.run.directory}/checkpoints/step=2")  # as NeMo counts
        if self.run.variant == "by hand" and trainer.global_step == 3:
            trainer.save_checkpoint(f"{base(self.run)}/step-3")
            trainer.save_checkpoint(f"{base(self.run)}0/step-3")


class Plain(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 8))

    def training_step(self, batch: Any, number: int) -> Any:
        return (self.model(batch[0]) ** 2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> Any:
        rank = torch.distributed.get_rank()
        data = torch.utils.data.TensorDataset(torch.randn(8, 16, generator=torch.Generator().manual_seed(rank)))
        return torch.utils.data.DataLoader(data, batch_size=8)


def train(run: Run) -> None:
    with on_cpu():
        _train(run)


def _strategy(variant: str, size: int) -> Any:
    if variant.startswith("fsdp2"):
        return nl.FSDP2Strategy(
            data_parallel_size=size, tensor_parallel_size=1, mp_policy=MixedPrecisionPolicy(),
            parallelize_fn=lambda model, device_mesh, **more: fully_shard(model, mesh=device_mesh["data_parallel"]),
        )  # fmt: skip
    return strategy(**MEGATRON.get(variant.partition(" delete")[0], {}))


def _train(run: Run) -> None:
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if "slow commits" in run.variant:
        run.commit_slowly(behind="sync" not in run.variant)
    plain = run.variant.startswith("fsdp2")
    folder = run.directory / "checkpoints"
    nl.resume.AppState().log_dir = run.directory
    flash = MLFlashCheckpointCallback(base(run), run.interval, run.skip, run.enabled, "delete" not in run.variant)
    run.checkpointer = lambda: flash.memory.checkpointer  # type: ignore[union-attr]
    callbacks: list[Any] = [Note(run)] if run.variant == "no callback" else [Note(run), flash]
    is_saved = bool(run.disk) or run.trigger in TRIGGERS
    if is_saved:
        run.directory.mkdir(exist_ok=True)
        disk = nl.ModelCheckpoint(
            dirpath=str(folder), monitor="step", mode="max", filename="{step}",
            save_last="link", save_top_k=run.kept or -1, save_optim_on_train_end=True, always_save_context=False,
            save_context_on_train_end=False, **TRIGGERS.get(run.trigger, {"every_n_train_steps": run.disk}),
        )  # fmt: skip
        disk.CHECKPOINT_NAME_LAST = "{step}-last"  # as NeMoLogger does
        callbacks.append(disk)
    trainer = nl.Trainer(
        strategy=_strategy(run.variant, size), accelerator="cpu", devices=size, max_steps=run.last, callbacks=callbacks,
        logger=False, enable_checkpointing=is_saved, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False, limit_val_batches=0, val_check_interval=0.0, default_root_dir=str(run.directory),
    )  # fmt: skip
    resume = nl.AutoResume(resume_from_directory=str(folder), resume_if_exists=True,
                           resume_ignore_no_checkpoint=run.variant != "must resume")  # fmt: skip
    model = Plain() if plain else Model(config(trainer.strategy.tensor_model_parallel_size))
    torch.manual_seed(100 + rank)
    if run.variant.startswith("tensor"):  # as ML Flashpoint's guide has it
        trainer.strategy.setup_environment()
    try:
        if run.variant != "not wrapped":
            resume = wrap_trainer_and_auto_resume_with_mlflash(
                trainer, base(run), "sync" not in run.variant, resume,
                always_save_context=run.variant.startswith("context"), enabled="wrap off" not in run.variant,
                **run.checkpointing,
            )  # fmt: skip
        if run.variant == "other io":  # as PEFT does
            trainer.strategy.checkpoint_io = trainer.strategy.unwrapped_checkpoint_io._wrapped
        resume.setup(trainer, model)
        if run.variant == "context":
            _note_context(run, resume.get_context_path(model))
        trainer.fit(model, **({} if plain else {"datamodule": Data("cyclic" if "epochs" in run.variant else "single")}))
    except Exception as error:
        note("refused", run=run.name, error=f"{type(error).__name__}: {error}")
        return
    if plain:
        run.end(model, trainer.optimizers)
        return
    Run(f"weights of {run.name}", run.last).end(model, [])
    (optimizer,) = trainer.optimizers
    inner = optimizer.mcore_optimizer
    states = [one.optimizer.state_dict()["state"] for one in getattr(inner, "chained_optimizers", [inner])]
    run.end(model, [optimizer], states)


def _note_context(run: Run, path: Path | None) -> None:
    hidden = nl.io.load_context(path, "model.config").hidden_size if path else None
    note("context", run=run.name, files=sorted(os.listdir(path)) if path else None, hidden=hidden)
