"""A small model that Lightning trains; its own checkpoints go to their place by itself, or behind training by mlflash.

Usage: lightning_files_job.py JSON. ``folder``: of the checkpoints; ``last``: the last step; ``how``: "stock" (without
mlflash) or "background"; ``kind``: "ddp" or "fsdp2"; ``keep``: arguments of ModelCheckpoint; ``resume``: a checkpoint's
name; ``die``: the step after whose save all are killed; the rest are settings of the callback.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from records import note
from torch.utils.data import DataLoader, TensorDataset

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from mlflash.adapters.lightning import MLFlashCallback


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 256), torch.nn.Linear(256, 8))

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            torch.distributed.fsdp.fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        loss: torch.Tensor = (self.net(batch[0]) ** 2).mean()
        note("loss", self.global_rank, step=self.trainer.global_step + 1, loss=loss.item())
        self.log("metric", -float(self.trainer.global_step), sync_dist=True)  # each step is the best so far
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Told(pl.Callback):
    """Notes what is there before each step, and dies where that is asked for."""

    def __init__(self, folder: Path, die: int):
        self.folder, self.die = folder, die

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        there = sorted(path.name for path in self.folder.glob("*.ckpt"))
        note("step", trainer.global_rank, step=trainer.global_step, there=there)
        if self.die and trainer.global_step == self.die:
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: str, last: int, how: str, kind: str = "ddp", keep: dict[str, Any] | None = None, resume: str = "",
         die: int = 0, **more: Any) -> None:  # fmt: skip
    torch.manual_seed(1)
    rank = int(os.environ["RANK"])
    saves = ModelCheckpoint(folder, filename="at-{step}", every_n_train_steps=2, **(keep or {}))
    callbacks: list[Any] = [saves, Told(Path(folder), die)]
    if how == "background":
        callbacks.append(MLFlashCallback(every_n_steps=100, in_background=True, **more))
    trainer = pl.Trainer(
        default_root_dir=folder, accelerator="cpu", devices=2, max_steps=last, callbacks=callbacks, logger=False,
        enable_progress_bar=False, enable_model_summary=False,
        strategy=ModelParallelStrategy(2, 1) if kind == "fsdp2" else DDPStrategy(),
    )  # fmt: skip
    rows = torch.randn(64, 16, generator=torch.Generator().manual_seed(rank))
    model = Model()
    trainer.fit(model, DataLoader(TensorDataset(rows), 2), ckpt_path=os.path.join(folder, resume) if resume else None)
    if trainer.strategy.is_global_zero:
        note(
            "end",
            rank,
            best=os.path.relpath(saves.best_model_path, folder),
            last=os.path.basename(saves.last_model_path),
        )


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
