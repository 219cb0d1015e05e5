"""A tiny GPT-2 that the Trainer trains; its own checkpoints go to disk by itself, or behind training by mlflash.

Usage: own_files_job.py JSON. ``folder``: output_dir; ``last``: the last step; ``how``: "stock" (without mlflash) or
"background"; ``best``: evaluate, and load the best model at the end, and then once more, without that, evaluate at the
end of epochs; ``die``: the step after whose save all are killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist
from records import note
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers_job import Rows, tiny

from mlflash.adapters.distributed import init_process_group
from mlflash.adapters.transformers import TrainerWrapper


class Told(TrainerCallback):
    """Notes what happens, and dies where that is asked for."""

    def __init__(self, die: int):
        self.die = die

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        note("step", args.process_index, step=state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        there = sorted(name for name in os.listdir(args.output_dir) if name.startswith("checkpoint-"))
        note("saved", args.process_index, step=state.global_step, there=there, best=state.best_model_checkpoint)
        if state.global_step == self.die:
            os.kill(os.getpid(), signal.SIGKILL)


class Noting(Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        note("loss", self.args.process_index, step=self.state.global_step + 1, loss=loss.item())
        return loss


def main(folder: str, last: int, how: str, best: bool = False, **more: Any) -> None:
    init_process_group(host="127.0.0.1")
    if best:
        at_steps = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
        train(folder, last, how, 64, at_steps, **more)
        # At step 4, once it is saved, an epoch ends, and is found the best.
        train(f"{folder}-epochs", last, how, 32, {"eval_strategy": "epoch", "metric_for_best_model": "loss"}, **more)
    else:
        train(folder, last, how, 64, {}, **more)
    dist.destroy_process_group()


def train(folder: str, last: int, how: str, rows: int, evaluates: dict[str, Any], die: int = 0, **more: Any) -> None:
    args = TrainingArguments(
        folder, max_steps=last, per_device_train_batch_size=4, save_strategy="steps", save_steps=2, save_total_limit=2,
        use_cpu=True, report_to="none", disable_tqdm=True, logging_steps=1, lr_scheduler_type="constant", **evaluates,
    )  # fmt: skip
    trainer = Noting(tiny(False), args, train_dataset=Rows(rows), eval_dataset=Rows(8), callbacks=[Told(die)])
    if how == "background":
        trainer = TrainerWrapper(trainer, save_mem_interval=100, in_background=True, **more)
    found = any(name.startswith("checkpoint-") for name in os.listdir(folder)) if os.path.isdir(folder) else False
    trainer.train(resume_from_checkpoint=True if found else None)
    note("end", args.process_index, there=sorted(os.listdir(folder)))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
