"""A small Llama that TorchTitan's Trainer trains, sharded by its FSDP2; "plain" is with its own checkpointer.

As a program it trains from TorchTitan's command line, and notes the config and the steps in memory.
"""

from __future__ import annotations

from titan_on_cpu import Training, config  # isort: skip  # before anything of TorchTitan

import dataclasses
import random
import sys
from typing import Any

import torch
from job import Run
from records import OUT, note
from torchtitan.components.checkpointer import BaseCheckpointManager, CheckpointManager
from torchtitan.config import ConfigManager

from mlflash.adapters.distributed import init_process_group
from mlflash.adapters.torchtitan import MemoryCheckpointManager
from mlflash.errors import ConfigError


def checkpoint_of(run: Run) -> Any:
    own = {
        "enable": run.trigger != "off", "interval": 2 if run.trigger == "interval" else run.disk or 1000,
        "keep_latest_k": run.kept, "last_save_model_only": False, "load_only": run.trigger == "load only",
        "enable_first_step_checkpoint": run.trigger == "first step", **run.options,
    }  # fmt: skip
    if run.variant == "plain":
        return CheckpointManager.Config(**own)
    settings = dict(run.checkpointing)
    return MemoryCheckpointManager.Config(
        memory_enable=run.enabled, memory_interval=run.interval, memory_skip=run.skip,
        memory_directory=settings.pop("directory", None), memory_settings=settings, **own,
    )  # fmt: skip


def train(run: Run) -> None:
    """Train to a step, from the newest checkpoint there is."""
    random.seed(torch.distributed.get_rank())  # TorchTitan does so with PyTorch's numbers only

    def said(step: int, loss: float) -> None:
        if run.variant == "draws":
            note("drawn", run=run.name, step=step, drawn=[torch.rand(()).item(), random.random()])
        run.loss(step, loss)

    steps = run.last if run.trigger == "last step" or run.variant in ("plain", "ends") else 100
    settings = config(str(run.directory), checkpoint_of(run), steps, draws=run.variant == "draws")
    training = Training(settings, run.last, said)
    run.checkpointer = lambda: training.checkpointer._flash
    try:
        training.train()
    except Exception as error:
        training.close()
        note("failed", run=run.name, error=f"{type(error).__name__}: {error}")
        return
    if (flash := getattr(training.checkpointer, "_flash", None)) is not None:
        flash.wait()
        note("counts", run=run.name, counts=flash.report()["counts"])
    training.close()
    run.end(training.model_parts[0], training.optimizers)


class OtherManager(BaseCheckpointManager):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        pass


def small() -> Any:
    """A config as those of TorchTitan's registries."""
    return config(str(OUT.parent / "disk-registry"), MemoryCheckpointManager.Config.beside(
        CheckpointManager.Config(interval=1000, keep_latest_k=3, async_mode="async"), memory_interval=7))  # fmt: skip


if __name__ == "__main__":
    init_process_group(host="127.0.0.1")
    note("start")
    try:
        MemoryCheckpointManager.Config.beside(OtherManager.Config())
    except ConfigError as error:
        note("other manager", error=str(error))
    parsed = ConfigManager().parse_args(["--module", "torchtitan_job", "--config", "small", *sys.argv[1:]])
    note("config", kind=type(parsed.checkpoint).__qualname__, checkpoint=parsed.checkpoint.to_dict())
    training = Training(parsed, 4, lambda step, loss: None)
    training.train()
    note("steps", steps=training.checkpointer._flash.steps())
    training.close()
