"""A training of a framework that stays in its processes when others are lost (`mlflash.keep_alive`).

Usage: kept_job.py transformers|lightning|lightning-fsdp2|megatron|nemo OUT LAST. Each rank adds a line for each step to
OUT/steps-RANK: step, loss and process. At the end it writes a digest of its state, its process and the number of calls
of ``train`` to OUT/end-RANK. While there is a file OUT/hold, rank 0 does not get beyond the step that the file names.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from digests import digest
from waiting import until

import mlflash
from mlflash.adapters.distributed import init_process_group

OUT, LAST = Path(sys.argv[2]), int(sys.argv[3])


def note(step: int, loss: float) -> None:
    rank = dist.get_rank()
    with (OUT / f"steps-{rank}").open("a") as file:
        file.write(f"{step} {loss.hex()} {os.getpid()}\n")
    if rank == 0:
        until(lambda: step < hold(), "the test to let it go on")


def hold() -> float:
    try:
        return int((OUT / "hold").read_text())
    except FileNotFoundError:
        return float("inf")


def of_transformers() -> Callable[[], Any]:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from mlflash.adapters.transformers import MLFlashCallback

    class Notes(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss: torch.Tensor = super().training_step(*args, **kwargs)
            note(self.state.global_step + 1, loss.item())
            return loss

    torch.manual_seed(1)
    config = GPT2Config(vocab_size=64, n_positions=12, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (64, 12))]

    def train() -> Any:
        args = TrainingArguments(
            output_dir=str(OUT / "disk"), per_device_train_batch_size=2, max_steps=LAST, learning_rate=1e-3,
            save_strategy="no", logging_strategy="steps", logging_steps=5, report_to="none", use_cpu=True,
            dataloader_pin_memory=False, ddp_backend="gloo",
        )  # fmt: skip
        trainer = Notes(model=model, args=args, train_dataset=rows, callbacks=[MLFlashCallback(every_n_steps=1)])
        torch.manual_seed(100 + dist.get_rank())
        trainer.train(resume_from_checkpoint=True)
        logged = [{name: log[name] for name in ("step", "loss") if name in log} for log in trainer.state.log_history]
        return [model, trainer.optimizer, trainer.lr_scheduler, logged, torch.get_rng_state()]

    return train


def of_lightning(is_sharded: bool = False) -> Callable[[], Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import lightning.pytorch as pl
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard
    from torch.utils.data import TensorDataset
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    from mlflash.adapters.lightning import MLFlashCallback

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 8))

        def configure_model(self) -> None:
            if is_sharded:
                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            loss: torch.Tensor = (self.net(batch[0]) ** 2).mean()
            note(self.trainer.global_step + 1, loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3), "interval": "step"}]

    torch.manual_seed(1)
    data, kept = TensorDataset(torch.randn(64, 16)), Model()

    def train() -> Any:
        rank, size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(1)
        model = Model() if is_sharded else kept
        torch.manual_seed(100 + rank)
        loader = StatefulDataLoader(data, batch_size=2, sampler=StatefulDistributedSampler(data, size, rank))
        callbacks: list[Any] = [MLFlashCallback(every_n_steps=1)]
        trainer = pl.Trainer(
            strategy=ModelParallelStrategy(size, 1) if is_sharded else "ddp", accelerator="cpu", devices=size,
            max_steps=LAST, callbacks=callbacks, logger=False,
            enable_checkpointing=False, enable_model_summary=False, enable_progress_bar=False,
            default_root_dir=OUT, use_distributed_sampler=False,
        )  # fmt: skip
        trainer.fit(model, loader)
        return [model, trainer.optimizers, [config.scheduler for config in trainer.lr_scheduler_configs],
                torch.get_rng_state()]  # fmt: skip

    return train


def of_megatron() -> Callable[[], Any]:
    """Tensor parallelism over two ranks, and over the others data parallelism with a distributed optimizer."""
    from megatron_pretrain import pretrain

    from mlflash.adapters.megatron import install

    install()
    flags = f"""
        --tensor-model-parallel-size 2 --use-distributed-optimizer --global-batch-size 4 --train-iters {LAST}
        --save {OUT}/disk --load {OUT}/disk --non-persistent-ckpt-type local --non-persistent-save-interval 1
        --non-persistent-local-ckpt-dir run
        """.split()
    return lambda: pretrain(flags, lambda step, loss, norm: note(step, loss + norm))


def of_nemo() -> Callable[[], Any]:
    from nemo_on_cpu import Data, Model, config, nl, on_cpu, pl, strategy

    from mlflash.adapters.nemo import MLFlashCheckpointCallback, wrap_trainer_and_auto_resume_with_mlflash

    class Note(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
            note(trainer.global_step, outputs["loss"].item())

    def train() -> Any:
        with on_cpu():
            callbacks = [Note(), MLFlashCheckpointCallback("flash", 1)]
            trainer = nl.Trainer(
                strategy=strategy(), accelerator="cpu", devices=dist.get_world_size(), max_steps=LAST, logger=False,
                callbacks=callbacks, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                use_distributed_sampler=False, limit_val_batches=0, val_check_interval=0.0, default_root_dir=str(OUT),
            )  # fmt: skip
            torch.manual_seed(100 + dist.get_rank())
            model = Model(config())
            wrapped = wrap_trainer_and_auto_resume_with_mlflash(trainer, "flash", True)
            wrapped.setup(trainer, model)
            trainer.fit(model, datamodule=Data(samples=2 * LAST))
        (optimizer,) = trainer.optimizers
        inner = optimizer.mcore_optimizer
        states = [one.optimizer.state_dict()["state"] for one in getattr(inner, "chained_optimizers", [inner])]
        return [model, states, torch.get_rng_state()]

    return train


FRAMEWORKS = {
    "transformers": of_transformers,
    "lightning": of_lightning,
    "lightning-fsdp2": lambda: of_lightning(is_sharded=True),
    "megatron": of_megatron,
    "nemo": of_nemo,
}


def main(framework: str) -> None:
    init_process_group()
    train = FRAMEWORKS[framework]()
    calls = 0

    def count() -> Any:
        nonlocal calls
        calls += 1
        return train()

    state = mlflash.keep_alive(count)
    left = {what: len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task")}
    end = {"digest": digest(state), "pid": os.getpid(), "calls": calls, **left}
    (OUT / f"end-{dist.get_rank()}").write_text(json.dumps(end))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
