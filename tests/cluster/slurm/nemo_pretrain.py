"""NeMo's training as a program, on CPUs: ``nemo_pretrain.py --log-dir DIR --flash BASE --last STEPS``.

The ranks have their process group. Each notes its losses; without a base, mlflash has no part in it.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from nemo_on_cpu import Data, Model, config, nl, on_cpu, pl, strategy
from records import note

# isort: split
from mlflash.adapters.nemo import MLFlashCheckpointCallback, wrap_trainer_and_auto_resume_with_mlflash


class Note(pl.Callback):
    """Notes each step's loss."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        """The loss of a step."""
        note("loss", step=trainer.global_step, loss=outputs["loss"].item())


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--log-dir", type=Path, required=True)
    parser.add_argument("--flash", default="")
    parser.add_argument("--last", type=int, required=True)
    asked = parser.parse_args()
    nl.resume.AppState().log_dir = asked.log_dir
    flash = MLFlashCheckpointCallback(asked.flash, 2, enabled=bool(asked.flash),
                                      keep_mlflash_checkpoint_on_train_end=True)  # fmt: skip
    devices = int(os.environ["LOCAL_WORLD_SIZE"])  # Lightning compares them with what Slurm says
    trainer = nl.Trainer(
        strategy=strategy(), accelerator="cpu", devices=devices, max_steps=asked.last, callbacks=[Note(), flash],
        num_nodes=torch.distributed.get_world_size() // devices, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False, limit_val_batches=0,
        val_check_interval=0.0,
    )  # fmt: skip
    resume = nl.AutoResume(resume_if_exists=True, resume_ignore_no_checkpoint=True)
    resume = wrap_trainer_and_auto_resume_with_mlflash(trainer, asked.flash, True, resume, directory=asked.flash)
    torch.manual_seed(100 + torch.distributed.get_rank())
    model = Model(config())
    resume.setup(trainer, model)
    trainer.fit(model, datamodule=Data(samples=2 * asked.last))


if __name__ == "__main__":
    with on_cpu():
        main()
