"""Managers of local checkpoints, and what Megatron-LM itself has, for the tests of this folder."""

from __future__ import annotations

import argparse
import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import megatron_on_cpu
import pytest
from torch_jobs import COMM

from mlflash.adapters.megatron import LocalCheckpoints


@pytest.fixture(autouse=True)
def _own_groups() -> Iterator[None]:
    """End the process groups of a test: each has threads that wake a hundred times a second, and there are many."""
    yield
    COMM.Barrier()  # no rank needs them any more
    megatron_on_cpu.end_groups()


@pytest.fixture
def start(options: dict[str, Any]) -> Callable[..., contextlib.AbstractContextManager[LocalCheckpoints]]:
    """Give a manager, as a relaunch would have it."""

    @contextlib.contextmanager
    def started(strategy: Any = "copy", **more: Any) -> Iterator[LocalCheckpoints]:
        manager = LocalCheckpoints("/local", "s", strategy, **{**options, **more})
        try:
            yield manager
        except BaseException:
            manager.checkpointer.__exit__(RuntimeError, None, None)
            raise
        manager.close()

    return started


class OfMegatron:
    """Megatron-LM's training, of which are there: its arguments, and what it does to save and load.

    Attributes:
        arguments: of a script that has them.
        checkpointing: the module, which has neither function yet.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path):
        self.arguments = argparse.Namespace(save=str(root / "save"), load=None, consumed_train_samples=0)
        training: Any = types.ModuleType("megatron.training")
        self.checkpointing: Any = types.ModuleType("megatron.training.checkpointing")
        training.get_args = lambda: self.arguments
        monkeypatch.setitem(sys.modules, "megatron.training", training)
        monkeypatch.setitem(sys.modules, "megatron.training.checkpointing", self.checkpointing)

    def has_saved(self, iteration: int, directory: str = "") -> None:
        """Let there be a checkpoint of its own. Collective."""
        if COMM.rank == 0:
            folder = Path(directory or self.arguments.save)
            folder.mkdir(exist_ok=True)
            (folder / "latest_checkpointed_iteration.txt").write_text(f"{iteration}\n")
        COMM.Barrier()


@pytest.fixture
def of_megatron(monkeypatch: pytest.MonkeyPatch, root: Path) -> OfMegatron:
    return OfMegatron(monkeypatch, root)
