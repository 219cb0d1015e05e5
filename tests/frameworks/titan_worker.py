"""Rank program of the tests of TorchTitan's own options: trainings, one after the other, as the test says."""

from __future__ import annotations

from titan_on_cpu import Training, config  # isort: skip  # before anything of TorchTitan

import dataclasses
import hashlib
import importlib
import importlib.metadata
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from records import OUT, note
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer import BaseCheckpointManager, CheckpointManager
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.config import ConfigManager

from mlflash import crash_points
from mlflash.adapters.distributed import init_process_group
from mlflash.adapters.torchtitan import MemoryCheckpointManager, _tensors
from mlflash.errors import ConfigError, StateError

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
        data: options of the data loader.
        layers: of the model.
        damaged: the checkpoint of this step is damaged in memory before it starts.
        refused: the first save in memory fails on all ranks.
        fails_at: rank 1 fails in this step.
    """

    name: str
    last: int
    job: str = ""
    steps: int = 100
    plain: bool = False
    checkpoint: dict[str, Any] = dataclasses.field(default_factory=dict)
    data: dict[str, Any] = dataclasses.field(default_factory=dict)
    layers: int = 1
    damaged: int = 0
    refused: bool = False
    fails_at: int = 0

    @property
    def folder(self) -> Path:
        """Where TorchTitan writes."""
        return ROOT / f"disk-{self.job}"

    def build(self) -> Any:
        """The checkpointer's config."""
        common = {"enable": True, "interval": 1000, "last_save_model_only": False, **self.checkpoint}
        if self.plain:
            return CheckpointManager.Config(**common)
        common["memory_settings"] = {"job": self.job, **common.get("memory_settings", {})}
        return MemoryCheckpointManager.Config(**{"memory_interval": 2, **common})


_slots: dict[tuple[str, int], set[Path]] = {}
"""By job and step, the files that this rank's node has of it."""


def refuse(point: str) -> None:
    """Let a save fail on this rank."""
    if point == "stage.begun":
        raise StateError("a trap")


def train(case: Case) -> None:
    """Do a training, and note what came of it."""
    random.seed(torch.distributed.get_rank())  # TorchTitan does so with PyTorch's numbers only
    np.random.seed(torch.distributed.get_rank())
    crash_points.arm(refuse if case.refused else None)
    if case.damaged:
        for path in _slots[case.job, case.damaged]:
            damage(path)
        torch.distributed.barrier()

    def say(step: int, loss: float) -> None:
        drawn = [torch.rand(()).item(), random.random(), float(np.random.rand())]
        note("loss", run=case.name, step=step, loss=loss, drawn=drawn)
        if step == case.fails_at:
            training.checkpointer._flash.wait()
            torch.distributed.barrier()
        if step == case.fails_at and torch.distributed.get_rank() == 1:
            raise RuntimeError("this step fails on purpose")

    training = Training(config(str(case.folder), case.build(), case.steps, case.layers, **case.data), case.last, say)
    try:
        training.train()
    except Exception as error:
        training.close()
        if case.fails_at:
            raise
        note("failed", run=case.name, error=f"{type(error).__name__}: {error}")
        return
    counts: dict[str, int] = {}
    if (flash := getattr(training.checkpointer, "_flash", None)) is not None:
        flash.wait()
        report = flash.report()
        counts = report["counts"]
        for slot in report["slots"]:
            _slots.setdefault((case.job, slot["step"]), set()).add(Path(report["memory"], slot["file"]))
    training.close()
    note("end", run=case.name, step=training.step, counts=counts, digest=digest(training))


def damage(path: Path) -> None:
    """Flip a byte in the middle of a file."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def digest(training: Training) -> str:
    """What all ranks have together of the weights and the optimizers' state."""
    found = hashlib.sha256()
    tensors = {**training.model_parts[0].state_dict(), **training.optimizers.state_dict()}
    for name, value in sorted(tensors.items()):
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if isinstance(whole, torch.Tensor):
            found.update(name.encode() + whole.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def names() -> None:
    """Note what is saved of a model that has buffers and is wrapped, and what TorchTitan would save of it."""
    model = torch.nn.Sequential(checkpoint_wrapper(torch.nn.BatchNorm1d(3)), torch.nn.Linear(3, 3))
    model.register_buffer("kept", torch.zeros(1))
    model.register_buffer("made anew", torch.zeros(1), persistent=False)
    note("names", saved=sorted(_tensors(model)), titans=sorted(map(canonical_fqn, model.state_dict())))


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
        names()
        other_managers()
        from_command_line(*arguments)
    note("done")
