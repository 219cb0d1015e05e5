"""A real Megatron Core where mlflash is off: its calls succeed, and only what Megatron itself writes is on disk."""

from __future__ import annotations

import argparse
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from megatron_on_cpu import Training, digest, on_cpu
from torch_jobs import COMM, job

from mlflash import Checkpointer

pytestmark = [
    pytest.mark.mpi(min_size=4),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),  # its own
]


def test_shards_are_neither_saved_nor_found(options: dict[str, Any], root: Path, enabled: bool) -> None:
    from megatron.core import dist_checkpointing

    from mlflash.adapters.megatron import LoadShards, SaveShards

    with job(), on_cpu(), Checkpointer(enabled=enabled, **options) as ckpt:
        training = Training()
        training.train(1)
        before = digest(training)
        save, load = SaveShards(ckpt), LoadShards(ckpt)
        for is_async in (False, True):
            request = dist_checkpointing.save(training.sharded_state(), save.directory(1), save,
                                              async_sharded_save=is_async)  # fmt: skip
            if is_async:
                request.execute_sync()
        assert load.directory() is None and digest(training) == before
    assert not list(root.glob("node*/*"))


def test_the_three_calls_leave_saving_and_loading_to_megatron(
    options: dict[str, Any], root: Path, monkeypatch: pytest.MonkeyPatch, enabled: bool
) -> None:
    from mlflash.adapters.megatron import easy

    arguments = argparse.Namespace(save=str(root / "save"), load=None, num_floating_point_operations_so_far=50)
    calls: list[tuple[Any, ...]] = []

    def save(iteration: int, model: Any, optimizer: Any, scheduler: Any, operations: int) -> None:
        calls.append((iteration, model, optimizer, scheduler, operations))
        if COMM.rank == 0:
            Path(arguments.save).mkdir(exist_ok=True)
            Path(arguments.save, "latest_checkpointed_iteration.txt").write_text(str(iteration))
        COMM.Barrier()

    training, checkpointing = types.ModuleType("megatron.training"), types.ModuleType("megatron.training.checkpointing")
    training.get_args = lambda: arguments
    checkpointing.save_checkpoint = save
    checkpointing.load_checkpoint = lambda model, optimizer, scheduler, which, strict: (
        int(Path(getattr(arguments, which), "latest_checkpointed_iteration.txt").read_text()), 0)  # fmt: skip
    monkeypatch.setitem(sys.modules, "megatron.training", training)
    monkeypatch.setitem(sys.modules, "megatron.training.checkpointing", checkpointing)
    with job():
        easy.initialize(2, 4, 1, enabled=enabled, **options)
        assert easy.load_checkpoint("model", "optimizer", None) == 0
        for iteration in range(1, 11):
            easy.save_checkpoint_if_needed(iteration, "model", "optimizer", None)
        easy.close()
        assert calls == [(4, ["model"], "optimizer", None, 50), (8, ["model"], "optimizer", None, 50)]
        easy.initialize(2, 0, 1, enabled=enabled, **options)
        assert easy.load_checkpoint("model", "optimizer", None) == 8, "what Megatron has saved to --save is found"
        easy.save_checkpoint_if_needed(12, "model", "optimizer", None)  # nothing goes to the directory
        arguments.load = str(root / "load")
        if COMM.rank == 0:
            Path(arguments.load).mkdir()
            Path(arguments.load, "latest_checkpointed_iteration.txt").write_text("8")
        COMM.Barrier()
        assert easy.load_checkpoint("model", "optimizer", None) == 8
        easy.close()
    assert len(calls) == 2 and not list(root.glob("node*/*"))


def test_on_again_what_megatron_has_saved_meanwhile_is_newer(
    options: dict[str, Any], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflash.adapters.megatron import easy

    arguments = argparse.Namespace(save=str(root / "save"), load=None, consumed_train_samples=0)
    training, checkpointing = types.ModuleType("megatron.training"), types.ModuleType("megatron.training.checkpointing")
    training.get_args = lambda: arguments
    checkpointing.load_checkpoint = lambda model, optimizer, scheduler, which, strict: (70, which)
    monkeypatch.setitem(sys.modules, "megatron.training", training)
    monkeypatch.setitem(sys.modules, "megatron.training.checkpointing", checkpointing)
    with job(), on_cpu():
        made = Training()
        easy.initialize(1, 0, 1, **options)
        made.train(2)
        easy.save_checkpoint_if_needed(2, made.model, made.optimizer, None)
        if COMM.rank == 0:
            Path(arguments.save).mkdir()
            Path(arguments.save, "latest_checkpointed_iteration.txt").write_text("7")
        COMM.Barrier()
        assert easy.load_checkpoint(made.model, made.optimizer, None) == 70
        easy.close()
