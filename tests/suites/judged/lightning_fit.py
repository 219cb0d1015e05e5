"""Lightning's Trainer, which writes steps 2 and 4; mlflash saves each step in memory, and drains steps 3 and 5.

Without dropout, as Lightning's own checkpoints have no random numbers: docs/lightning.md.

Usage: python lightning_fit.py OUT mlflash|lightning
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from plain import begin, settle
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from mlflash.adapters.lightning import MLFlashCallback

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint


class Model(pl.LightningModule):
    flash: MLFlashCallback | None = None
    start: int | None = None  # the step after which training begins; None: it has ended already

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Linear(64, 8))

    def on_train_start(self) -> None:
        self.start = self.global_step

    def on_train_batch_start(self, *args: Any) -> None:
        if self.flash is not None:
            settle(self.flash.checkpointer)

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        return (self.net(batch[0]) ** 2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def main(saves_by: str) -> None:
    pl.seed_everything(1)
    loader = StatefulDataLoader(TensorDataset(torch.randn(64, 16)), batch_size=8)
    model = Model()
    callbacks: list[pl.Callback] = [ModelCheckpoint("own", every_n_train_steps=2, save_top_k=-1, save_last=True)]
    if saves_by == "mlflash":
        model.flash = MLFlashCallback(every_n_steps=1, directory="run", redundancy="none", drain_every=3)
        callbacks.insert(0, model.flash)
    trainer = pl.Trainer(
        max_steps=5, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, callbacks=callbacks,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, loader, ckpt_path="last")
    print(f"resumed from step {trainer.global_step if model.start is None else model.start}")
    torch.save(model.state_dict(), "final.pt")


if __name__ == "__main__":
    main(begin())
