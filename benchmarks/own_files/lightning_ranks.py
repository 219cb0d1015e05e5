"""Lightning trains some layers, and after the first step saves in each compared way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from rounds import ASYNC, DCP, ITSELF, OURS, Rounds, Way, dcp_way

from mlflash.adapters.distributed import init_process_group
from mlflash.adapters.lightning import MLFlashCallback

WIDTH, BATCH = 1024, 64
CASE = "Lightning, DDP"


class Model(pl.LightningModule):
    """A model with ``layers`` layers."""

    def __init__(self, layers: int):
        super().__init__()
        self.net = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)))

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Saves(pl.Callback):
    """Measures at the end of a step: after the first one all ways, and later what mlflash's callback has just saved."""

    def __init__(self, rounds: Rounds, flash: Any):
        self.rounds, self.flash = rounds, flash

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        if trainer.global_step == 1:
            self.of_files(trainer, module)
        else:
            self.rounds.after_save(self.flash.checkpointer)

    def of_files(self, trainer: Any, module: Any) -> None:
        """Time all ways in which Lightning can save its state."""
        strategy, plain = trainer.strategy, trainer.strategy.checkpoint_io
        ours, peer = strategy.save_checkpoint, AsyncCheckpointIO(plain)

        def save(folder: Path, background: bool = False, io: Any = plain) -> None:
            strategy.save_checkpoint = ours if background else type(strategy).save_checkpoint.__get__(strategy)
            strategy.checkpoint_io = io
            trainer.save_checkpoint(folder / "saved.ckpt")
            strategy.save_checkpoint, strategy.checkpoint_io = ours, plain

        def state() -> dict[str, Any]:
            return {"model": module.state_dict(), "optimizer": trainer.optimizers[0].state_dict()}

        self.rounds.measure(CASE, {
            ITSELF: Way(save),
            OURS: Way(lambda folder: save(folder, background=True), ours.__self__.finish),
            ASYNC: Way(lambda folder: save(folder, io=peer), peer.teardown),
            DCP: dcp_way(state),
        })  # fmt: skip


def train(rounds: Rounds) -> None:
    init_process_group(comm=rounds.comm)
    flash = MLFlashCallback(every_n_steps=1, in_background=True, job="own-files", comm=rounds.comm,
                            memory=rounds.memory)  # fmt: skip
    off = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = pl.Trainer(default_root_dir=rounds.memory, accelerator="cpu", devices=rounds.comm.size,
                         max_steps=rounds.steps, callbacks=[flash, Saves(rounds, flash)], strategy=DDPStrategy(),
                         **off)  # fmt: skip
    model = Model(max(1, rounds.parameters // (WIDTH * WIDTH)))
    batches = [torch.ones(BATCH, WIDTH)] * (rounds.steps * rounds.comm.size)
    trainer.fit(model, torch.utils.data.DataLoader(batches, batch_size=None))  # one epoch
    rounds.show_in_memory(CASE)
    dist.destroy_process_group()
