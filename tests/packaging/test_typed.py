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
            "mlflash.adapters.dcp.reader.MemoryReader", "mlflash.saving.snapshot.Snapshot", "int | None"]  # fmt: skip


def check(program: str, checkers: Path, environment: Path, folder: Path) -> list[str]:
    (folder / "train.py").write_text(program)
    mypy = [checkers / "mypy", "--strict", "--config-file=", "--cache-dir", folder / "cache"]
    done = subprocess.run([*mypy, "--python-executable", environment / "bin/python", "train.py"], cwd=folder,
                          capture_output=True, text=True, timeout=110)  # fmt: skip
    assert not done.stderr and str(REPO) not in done.stdout
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With what mypy has found out about torch: that takes it half a minute."""
    return tmp_path_factory.mktemp("typed")


def test_the_types_of_core_and_adapters_are_seen(checkers: Path, torch_environment: Path, folder: Path) -> None:
    said = check(PROGRAM, checkers, torch_environment, folder)
    assert not [line for line in said if "error:" in line], said
    assert re.findall(r'Revealed type is "(.*)"', "\n".join(said)) == REVEALED
