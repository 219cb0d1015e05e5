"""A small model that Lightning trains: DDP, or sharded by FSDP2; two batches to a step, or validation in between."""

from __future__ import annotations

import datetime
import os
import signal
import warnings
from typing import Any
from unittest import mock

import torch
from job import Run
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy

from mlflash.adapters.lightning import MLFlashCallback, MLFlashCheckpointIO


class Model(pl.LightningModule):
    """Two layers and dropout; it counts its batches in a hook that comes after those of all callbacks."""

    def __init__(self, run: Run):
        super().__init__()
        self.run = run
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 2048), torch.nn.Dropout(0.1), torch.nn.Linear(2048, 8))
        self.register_buffer("batches", torch.zeros(()))

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            torch.distributed.fsdp.fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        loss: torch.Tensor = (self.net(batch[0]) ** 2).mean()
        step = self.trainer.global_step + 1
        self.run.loss(step, loss.item())
        if self.run.trigger.startswith("best"):  # each step is the best so far
            self.log("metric", -float(step), sync_dist=True)
        if self.run.variant == "signal" and step == 3 and self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.batches += 1

    def validation_step(self, batch: Any, number: int) -> None:
        self.log("metric", (self.net(batch[0]) ** 2).mean() + torch.rand(()), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        if self.run.variant == "validate":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
            return [optimizer], [{"scheduler": plateau, "interval": "epoch", "monitor": "metric"}]
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3), "interval": "step"}]


class FSDP1Strategy(FSDPStrategy):
    """On CPUs, which Lightning refuses to the class itself."""

    def _setup_model(self, model: Any) -> Any:
        init = FullyShardedDataParallel.__init__

        def on_cpu(own: Any, *args: Any, **kwargs: Any) -> None:
            init(own, *args, **{**kwargs, "device_id": torch.device("cpu")})

        with mock.patch.object(FullyShardedDataParallel, "__init__", on_cpu):
            return super()._setup_model(model)


class Average(pl.Callback):
    """A mean of the weights: the state of a callback, changed after each batch."""

    def __init__(self) -> None:
        self.mean: torch.Tensor | float = 0.0

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        weight = module.net[0].weight.detach()
        if hasattr(weight, "full_tensor"):
            weight = weight.full_tensor()
        elif isinstance(trainer.strategy, FSDPStrategy):
            weight = weight.sum()  # of this rank's shard: from disk all ranks get what rank 0 had
        self.mean = 0.9 * self.mean + 0.1 * weight

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean = state["mean"]


class ByHand(pl.Callback):
    """Saves after step 3, as a hook of a user's may."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(f"{trainer.default_root_dir}/by-hand.ckpt")


class Changes(pl.Callback):
    """Gives the model other weights in a hook, as averages and clipping do, by a write that torch counts, or not."""

    def __init__(self, hook: str):
        setattr(self, hook, self._change)

    @torch.no_grad()
    def _change(self, trainer: Any, module: Any, *args: Any) -> None:
        weight = module.net[0].weight
        (weight if trainer.global_step % 2 else weight.data).mul_(0.5)


BEST = {"every_n_train_steps": 2, "monitor": "metric", "mode": "min"}
TRIGGERS: dict[str, dict[str, Any]] = {
    "train steps": {"every_n_train_steps": 2},
    "epochs": {"every_n_epochs": 1},
    "time": {"train_time_interval": datetime.timedelta(0)},
    "epoch end": {"every_n_epochs": 1, "save_on_train_epoch_end": True, "save_last": True},
    "validation": {"every_n_epochs": 1, "save_on_train_epoch_end": False},
    "last": {"every_n_train_steps": 100, "save_last": True},
    "weights only": {"every_n_train_steps": 2, "save_weights_only": True},
    "best two, linked": {"save_top_k": 2, "save_last": "link", **BEST},
    "best one, copied": {"save_top_k": 1, "save_last": True, **BEST},
    "best two": {"save_top_k": 2, **BEST},
}


def strategy(run: Run, size: int) -> Any:
    if run.variant == "fsdp2":
        return ModelParallelStrategy(size, 1)
    if run.variant == "fsdp1":
        mesh = torch.distributed.init_device_mesh("cpu", (size,))
        return FSDP1Strategy(device_mesh=mesh, auto_wrap_policy={torch.nn.Linear}, state_dict_type="sharded")
    return DDPStrategy()


def train(run: Run) -> None:
    """Train to a step, from the newest checkpoint there is, or the one that the variant names; or only validate it."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(1)
    model, average = Model(run), Average()
    torch.manual_seed(100 + rank)
    signals = [signal.SIGUSR1] if run.variant == "signal" else []
    flash = MLFlashCallback(run.interval, run.skip, run.enabled, signals=signals, **run.checkpointing)
    run.checkpointer = lambda: flash.checkpointer
    if run.variant == "slow commits":
        run.commit_slowly(behind=run.settings.get("async_save", True))
    callbacks: list[Any] = [flash, average]
    if run.trigger in TRIGGERS:
        callbacks.append(ModelCheckpoint(run.directory, **{"save_top_k": -1, **TRIGGERS[run.trigger]}))
    if run.variant.startswith("changes "):
        callbacks.append(Changes(run.variant.removeprefix("changes ")))
    if run.trigger == "by hand":
        callbacks.append(ByHand())
    if run.disk:
        callbacks.append(ModelCheckpoint(run.directory, every_n_train_steps=run.disk, save_last=True,
                                         save_top_k=run.kept or -1))  # fmt: skip
    # Four batches to the epoch; or five, two to the step, so that the last one makes a step by itself.
    rows = 10 if run.variant == "accumulate" else 8
    data = TensorDataset(torch.randn(rows * size, 16, generator=torch.Generator().manual_seed(3)))
    trainer = pl.Trainer(
        strategy=strategy(run, size),
        accelerator="cpu", devices=size, max_steps=run.last if run.workers is None else -1,
        max_epochs=None if run.workers is None else 3, callbacks=callbacks, logger=False,
        enable_checkpointing=bool(run.disk) or run.trigger in TRIGGERS, enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=run.directory, use_distributed_sampler=False,
        accumulate_grad_batches=2 if run.variant == "accumulate" else 1, num_sanity_val_steps=1,
        val_check_interval=2 if run.variant == "validate" else None,
        plugins=[MLFlashCheckpointIO(**run.checkpointing)] if run.variant == "only validate" else None,
    )  # fmt: skip
    sampler = StatefulDistributedSampler(data, size, rank)
    loader = StatefulDataLoader(data, batch_size=2, sampler=sampler, num_workers=run.workers or 0)
    valid = torch.utils.data.DataLoader(data, batch_size=16)
    on_disk = "last" if run.disk or run.trigger.startswith("best") else None
    path = run.variant if run.variant.startswith("mlflash:") else on_disk
    if run.variant == "only validate":
        trainer.validate(model, valid, ckpt_path="mlflash:newest", verbose=False)
    else:
        trainer.fit(model, loader, valid if run.variant == "validate" else None, ckpt_path=path)
    if run.variant == "twice":
        trainer.fit_loop.epoch_loop.max_steps += 1
        trainer.fit(model, loader)
    if run.name.endswith("validated"):
        run.end(model, [])
    else:
        loop = trainer.fit_loop.epoch_loop  # a logger's step, and whether the epoch has ended
        counted = torch.tensor([loop._batches_that_stepped, loop.batch_progress.is_last_batch])
        run.end(model, trainer.optimizers, [average.mean, counted])
