"""The program of each rank: Hugging Face's Trainer trains a GPT-2 and then saves in each compared way."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rounds import COMM, DCP, ITSELF, OURS, Rounds, Way, dcp_way
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from mlflash.adapters.distributed import init_process_group
from mlflash.adapters.transformers import MLFlashCallback, TrainerWrapper

WIDTH, TOKENS, BATCH = 512, 512, 8


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """A dataset with ``count`` rows."""

    def __init__(self, count: int):
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        tokens = torch.arange(8) + number
        return {"input_ids": tokens, "labels": tokens}


class Saves(TrainerCallback):
    """Runs the measurements at the end of a step."""

    def __init__(self, rounds: Rounds):
        self.rounds, self.trainer = rounds, None

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        trainer: Any = self.trainer
        if state.global_step > 1:
            return
        flash = next(one for one in trainer.callback_handler.callbacks if isinstance(one, MLFlashCallback))
        save = flash._state.save
        flash._every = 1  # from the next step on
        flash._state.save = lambda *given: self.rounds.in_memory(flash.checkpointer, functools.partial(save, *given))

        def into(folder: Path, save: Any) -> None:
            args.output_dir = str(folder)
            save(model, None)

        optimizer = trainer.optimizer
        self.rounds.measure("Transformers' Trainer, DDP", {
            ITSELF: Way(lambda folder: into(folder, lambda *given: type(trainer)._save_checkpoint(trainer, *given))),
            OURS: Way(lambda folder: into(folder, trainer._save_checkpoint), lambda: trainer._get_output_dir(None)),
            DCP: dcp_way(lambda: {"model": trainer.model.state_dict(), "optimizer": optimizer.state_dict()}),
        })  # fmt: skip


def main() -> None:
    rounds = Rounds()
    init_process_group(comm=COMM)
    layers = max(1, rounds.parameters // (12 * WIDTH**2))
    config = GPT2Config(vocab_size=TOKENS, n_positions=16, n_embd=WIDTH, n_layer=layers, n_head=8)
    args = TrainingArguments(
        rounds.memory, max_steps=rounds.steps, per_device_train_batch_size=BATCH, save_strategy="no", use_cpu=True,
        report_to="none", disable_tqdm=True,
    )  # fmt: skip
    saves = Saves(rounds)
    trainer = Trainer(
        GPT2LMHeadModel(config), args, train_dataset=Tokens(rounds.steps * BATCH * COMM.size), callbacks=[saves]
    )
    saves.trainer = TrainerWrapper(trainer, save_mem_interval=1000, in_background=True, job="own-files", comm=COMM,
                                   memory=rounds.memory)  # fmt: skip
    trainer.train()
    rounds.show_in_memory("Transformers' Trainer, DDP")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
