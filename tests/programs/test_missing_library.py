"""A compressed checkpoint where the library that reads it is not installed: it is not damaged, and stays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import PATIENCE_S

pytest.importorskip("hdf5plugin", reason="needs hdf5plugin: pip install 'mlflash[compression]'")
PROGRAM = """
import sys
if sys.argv[2] == "without":
    sys.modules["hdf5plugin"] = None
import numpy as np
import mlflash

settings = {"job": "j", "compression": "zstd", "keep_last": 1} if sys.argv[2] == "saves" else {"job": "k"}
with mlflash.Checkpointer(sys.argv[1], redundancy="none", **settings) as ckpt:
    state = {"a": np.tile(np.arange(5000.0), 50)}
    if sys.argv[2] == "saves":
        for step in (1, 2):
            ckpt.save(step, state).wait()
            ckpt.drain().wait()
    else:
        state["a"][:] = 0
        try:
            print(ckpt.restore(state), state["a"].sum())
        except mlflash.errors.ConfigError as error:
            print(error)
"""


def test_it_is_named_and_nothing_older_is_restored(shm: Path, tmp_path: Path) -> None:
    env = {**os.environ, "MLFLASH_MEMORY": str(shm)}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path / "d"), *words], env=env, cwd=tmp_path,
                              capture_output=True, text=True, timeout=PATIENCE_S, check=False)  # fmt: skip

    assert run("saves").returncode == 0
    said = run("without")
    assert said.returncode == 0 and "cannot be read here: its compression (" in said.stdout, said.stdout + said.stderr
    assert "is not installed: pip install 'mlflash[compression]'" in said.stdout and "damaged" not in said.stderr
    assert [path.name for path in (tmp_path / "d").glob("step-*")] == ["step-00000002"]
    program = "import sys; sys.modules['hdf5plugin'] = None; from mlflash.cli import main; main()"
    words = [sys.executable, "-c", program, "verify", "--directory", str(tmp_path / "d"), "--memory", str(shm)]
    told = subprocess.run(words, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert "is not installed: pip install 'mlflash[compression]'" in told.stdout + told.stderr
    assert run("with").stdout == f"2 {50 * sum(range(5000)):.1f}\n"
