"""Rank program of the tests of TorchTitan's own options: trainings, one after the other, as the test says."""

from __future__ import annotations

from titan_on_cpu import Training, config  # isort: skip  # before anything of TorchTitan

import dataclasses
import hashlib
import importlib
import importlib.metadata
import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from records import OUT, note
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer import BaseCheckpointManager, CheckpointManager
from torchtitan.config import ConfigManager

from mlflash.adapters.distributed import init_process_group
from mlflash.adapters.torchtitan import MemoryCheckpointManager
from mlflash.errors import ConfigError

ROOT = OUT.parent


@dataclasses.dataclass
class Case:
    """One training.

    Attributes:
        name: of what it notes.
        last: step after which it stops.
        job: ties it to the trainings before it.
        steps: after which it would end.
        plain: with TorchTitan's own checkpointer.
        checkpoint: options of the checkpointer.
        draws: whether the data loader draws from the random numbers of all.
    """

    name: str
    last: int
    job: str = ""
    steps: int = 100
    plain: bool = False
    checkpoint: dict[str, Any] = dataclasses.field(default_factory=dict)
    draws: bool = False

    @property
    def folder(self) -> Path:
        """Where TorchTitan writes."""
        return ROOT / f"disk-{self.job}"

    def build(self) -> Any:
        """The checkpointer's config."""
        common = {"enable": True, "interval": 1000, "last_save_model_only": False, **self.checkpoint}
        if self.plain:
            return CheckpointManager.Config(**common)
        common["memory_settings"] = {"job": self.job}
        return MemoryCheckpointManager.Config(**{"memory_interval": 2, **common})


def train(case: Case) -> None:
    """Do a training, and note what came of it."""

    random.seed(torch.distributed.get_rank())  # TorchTitan does so with PyTorch's numbers only

    def say(step: int, loss: float) -> None:
        note("loss", run=case.name, step=step, loss=loss, drawn=[torch.rand(()).item(), random.random()])

    training = Training(config(str(case.folder), case.build(), case.steps, draws=case.draws), case.last, say)
    try:
        training.train()
    except Exception as error:
        training.close()
        note("failed", run=case.name, error=f"{type(error).__name__}: {error}")
        return
    counts: dict[str, int] = {}
    if (flash := getattr(training.checkpointer, "_flash", None)) is not None:
        flash.wait()
        counts = flash.report()["counts"]
    training.close()
    note("end", run=case.name, step=training.step, counts=counts, digest=digest(training))


def digest(training: Training) -> str:
    """What all ranks have together of the weights and the optimizers' state."""
    found = hashlib.sha256()
    tensors = {**training.model_parts[0].state_dict(), **training.optimizers.state_dict()}
    for name, value in sorted(tensors.items()):
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if isinstance(whole, torch.Tensor):
            found.update(name.encode() + whole.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class OtherManager(BaseCheckpointManager):
    """A back end that is not DCP."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        pass


def other_managers() -> None:
    """Note what comes of other managers than the one that writes by DCP."""
    try:
        MemoryCheckpointManager.Config.beside(OtherManager.Config())
    except ConfigError as error:
        note("other manager", error=str(error))
    try:
        importlib.import_module("torchtitan.components.checkpointer.torch_checkpointing")
    except ImportError as error:
        note("torch_checkpointing", version=importlib.metadata.version("torch_checkpointing"), error=str(error))


def small() -> Any:
    """A config as those of TorchTitan's registries."""
    return config(str(ROOT / "disk-registry"), MemoryCheckpointManager.Config.beside(
        CheckpointManager.Config(interval=1000, keep_latest_k=3, async_mode="async"), memory_interval=7))  # fmt: skip


def from_command_line(*arguments: str) -> None:
    """Train as TorchTitan's own main program does, from a registry and the command line."""
    parsed = ConfigManager().parse_args(["--module", "titan_worker", "--config", "small", *arguments])
    note("config", kind=type(parsed.checkpoint).__qualname__, checkpoint=parsed.checkpoint.to_dict())
    training = Training(parsed, 4, lambda step, loss: None)
    training.train()
    note("steps", steps=training.checkpointer._flash.steps())
    training.close()


if __name__ == "__main__":
    init_process_group(host="127.0.0.1")
    note("start")
    cases, arguments = json.loads(sys.argv[1])
    for spec in cases:
        train(Case(**spec))
    if arguments:
        other_managers()
        from_command_line(*arguments)
    note("done")
