"""What a user's type checker sees of the package that is installed."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from building import REPO

pytestmark = pytest.mark.timeout(400)

PROGRAM = """
import numpy as np
import torch

import mlflash
from mlflash import Checkpointer, Snapshot
from mlflash.adapters.dcp import MemoryReader, MemoryWriter
from mlflash.adapters.distributed import init_process_group


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    init_process_group()
    state = {"model": model, "optimizer": optimizer, "lr": 0.1, "seen": np.zeros(3), "rng": mlflash.rng()}
    with mlflash.Checkpointer("/lustre/run42", redundancy="xor:8", drain_every=10) as ckpt:
        start = ckpt.restore(state) or 0
        snapshot: Snapshot = ckpt.save(start + 1, state, until=optimizer)
        reveal_type(ckpt)
        reveal_type(start)
        reveal_type(ckpt.survives)
        reveal_type(MemoryWriter(ckpt))
        reveal_type(MemoryReader(ckpt))
        try:
            reveal_type(snapshot.wait(3.0))
        except mlflash.errors.DeadlineExceeded as error:
            reveal_type(error.rank)
    return start
"""
REVEALED = ["mlflash.checkpointer.checkpointer.Checkpointer", "int", "str", "mlflash.adapters.dcp.writer.MemoryWriter",
            "mlflash.adapters.dcp.reader.MemoryReader", "mlflash.save.snapshot.Snapshot", "int | None"]  # fmt: skip


def test_the_types_of_core_and_adapters_are_seen(checkers: Path, torch_environment: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    mypy = [checkers / "mypy", "--strict", "--config-file=", "--cache-dir", tmp_path / "cache"]
    done = subprocess.run([*mypy, "--python-executable", torch_environment / "bin/python", "train.py"], cwd=tmp_path,
                          capture_output=True, text=True, timeout=110)  # fmt: skip
    assert not done.stderr and str(REPO) not in done.stdout and "error:" not in done.stdout, done.stdout
    assert re.findall(r'Revealed type is "(.*)"', done.stdout) == REVEALED
