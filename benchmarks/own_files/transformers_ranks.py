"""Hugging Face's Trainer trains a GPT-2, and after the first step saves in each compared way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rounds import DCP, ITSELF, OURS, Rounds, Way, dcp_way
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from mlflash.adapters.distributed import init_process_group
from mlflash.adapters.transformers import MLFlashCallback, TrainerWrapper

WIDTH, TOKENS, BATCH = 512, 512, 8
CASE = "Transformers' Trainer, DDP"


class Saves(TrainerCallback):
    """Measures at the end of a step: after the first one all ways, and later what mlflash's callback has just saved."""

    def __init__(self, rounds: Rounds, trainer: Any):
        self.rounds, self.trainer = rounds, trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        trainer, handler = self.trainer, self.trainer.callback_handler
        if state.global_step > 1:
            flash = next(callback for callback in handler.callbacks if isinstance(callback, MLFlashCallback))
            self.rounds.after_save(flash.checkpointer)
            return

        def into(folder: Path, save: Any) -> None:
            args.output_dir = str(folder)
            save(trainer.model, None)

        self.rounds.measure(CASE, {
            ITSELF: Way(lambda folder: into(folder, type(trainer)._save_checkpoint.__get__(trainer))),
            OURS: Way(lambda folder: into(folder, trainer._save_checkpoint), lambda: trainer._get_output_dir(None)),
            DCP: dcp_way(lambda: {"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}),
        })  # fmt: skip


def train(rounds: Rounds) -> None:
    init_process_group(comm=rounds.comm)
    layers = max(1, rounds.parameters // (12 * WIDTH**2))
    config = GPT2Config(vocab_size=TOKENS, n_positions=16, n_embd=WIDTH, n_layer=layers, n_head=8)
    args = TrainingArguments(
        rounds.memory, max_steps=rounds.steps, per_device_train_batch_size=BATCH, save_strategy="no", use_cpu=True,
        report_to="none", disable_tqdm=True,
    )  # fmt: skip
    tokens = [{"input_ids": torch.arange(8) + n, "labels": torch.arange(8) + n}
              for n in range(rounds.steps * BATCH * rounds.comm.size)]  # fmt: skip
    trainer = Trainer(GPT2LMHeadModel(config), args, train_dataset=tokens)
    wrapper = TrainerWrapper(trainer, save_mem_interval=1, in_background=True, job="own-files", comm=rounds.comm,
                             memory=rounds.memory)  # fmt: skip
    trainer.add_callback(Saves(rounds, wrapper))
    trainer.train()
    rounds.show_in_memory(CASE)
    dist.destroy_process_group()
