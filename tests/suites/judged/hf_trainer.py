"""Hugging Face's Trainer, which writes steps 2, 4 and 5; mlflash saves each step in memory, and drains steps 3 and 5.

Usage: python hf_trainer.py OUT mlflash|trainer
"""

from __future__ import annotations

from typing import Any

import torch
from plain import begin, settle
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from mlflash.adapters.transformers import MLFlashCallback


class Rows(torch.utils.data.Dataset):
    tokens = torch.randint(0, 64, (16, 12), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[row], "labels": self.tokens[row]}


class Tells(TrainerCallback):
    """Tells where training begins, and waits for drains."""

    flash: MLFlashCallback | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        print(f"resumed from step {state.global_step}", flush=True)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.flash is not None:
            settle(self.flash.checkpointer)


def main(saves_by: str) -> None:
    torch.manual_seed(1)
    args = TrainingArguments(
        "own", max_steps=5, per_device_train_batch_size=4, save_strategy="steps", save_steps=2, use_cpu=True,
        report_to="none", disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    config = GPT2Config(vocab_size=64, n_positions=12, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    callbacks: list[TrainerCallback] = [tells := Tells()]
    if saves_by == "mlflash":
        tells.flash = MLFlashCallback(every_n_steps=1, directory="run", redundancy="none", drain_every=3)
        callbacks.append(tells.flash)
    trainer = Trainer(GPT2LMHeadModel(config), args, train_dataset=Rows(), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=True if saves_by == "mlflash" else get_last_checkpoint("own"))
    torch.save(trainer.model.state_dict(), "final.pt")


if __name__ == "__main__":
    main(begin())
