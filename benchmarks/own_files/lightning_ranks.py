"""The program of each rank: Lightning trains some layers, and after the first step saves in each compared way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from rounds import COMM, DCP, ITSELF, OURS, Rounds, Way, dcp_way
from torch.utils.data import DataLoader, Dataset

from mlflash.adapters.distributed import init_process_group
from mlflash.adapters.lightning import MLFlashCallback
from mlflash.adapters.lightning.states import state_of

WIDTH, BATCH = 1024, 64
ASYNC = "AsyncCheckpointIO"


class Rows(Dataset[torch.Tensor]):
    """A dataset with ``count`` rows."""

    def __init__(self, count: int):
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.ones(WIDTH)


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
    """Runs the measurements at the end of a step."""

    def __init__(self, rounds: Rounds, flash: Any):
        self.rounds, self.flash = rounds, flash

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        if trainer.global_step == 1:
            self.of_files(trainer, module)
        else:
            flash = self.flash.checkpointer
            self.rounds.in_memory(flash, lambda: flash.adapting.save_or_warn(
                trainer.global_step, state_of(trainer), trainer.optimizers))  # fmt: skip

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

        self.rounds.measure("Lightning, DDP", {
            ITSELF: Way(save),
            OURS: Way(lambda folder: save(folder, background=True), ours.__self__.finish),
            ASYNC: Way(lambda folder: save(folder, io=peer), peer.teardown),
            DCP: dcp_way(state),
        })  # fmt: skip


def main() -> None:
    rounds = Rounds()
    init_process_group(comm=COMM)
    ours = MLFlashCallback(every_n_steps=1000, in_background=True, job="own-files", comm=COMM, memory=rounds.memory)
    off = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = pl.Trainer(default_root_dir=rounds.memory, accelerator="cpu", devices=COMM.size, max_steps=rounds.steps,
                         callbacks=[Saves(rounds, ours), ours], strategy=DDPStrategy(), **off)  # fmt: skip
    model = Model(max(1, rounds.parameters // (WIDTH * WIDTH)))
    trainer.fit(model, DataLoader(Rows(rounds.steps * BATCH * COMM.size), BATCH))  # one epoch
    rounds.show_in_memory("Lightning, DDP")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
