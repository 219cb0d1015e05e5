"""Libraries that are not installed: what cannot be read without one is not damaged, and what needs none needs none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import PATIENCE_S

pytest.importorskip("hdf5plugin", reason="needs hdf5plugin: pip install 'mlflash[compression]'")
PROGRAM = """
import sys
if sys.argv[2] == "without":
    sys.modules["hdf5plugin"] = None
import numpy as np
import mlflash

settings = {"job": "k"}
if sys.argv[2] == "saves":
    settings = {"job": "j", "format": "hdf5", "compression": "zstd", "keep_last": 1}
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


WITHOUT_TORCH = """
import sys
import numpy as np
import mlflash

state = {"array": np.arange(1000.0), "step": 3, "names": ["a", ("b", None)], "ratio": 0.5}
with mlflash.Checkpointer(sys.argv[1], job="n", redundancy="none", drain_every=1) as ckpt:
    ckpt.save(1, state).wait()
"""


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_drain_in_the_format_of_pytorch_needs_no_pytorch(shm: Path, tmp_path: Path) -> None:
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise ModuleNotFoundError('there is no torch here', name='torch')\n")
    env = {**os.environ, "MLFLASH_MEMORY": str(shm), "PYTHONPATH": str(tmp_path)}
    words = [sys.executable, "-W", "error", "-c", WITHOUT_TORCH, str(tmp_path / "d")]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    loaded: dict[str, Any] = dict.fromkeys(("array", "step", "names", "ratio"), 0)
    dcp.load(loaded, checkpoint_id=str(tmp_path / "d" / "step-00000001"), no_dist=True)
    assert (loaded["array"] == range(1000)).all() and (loaded["step"], loaded["ratio"]) == (3, 0.5)
    assert loaded["names"] == ["a", ("b", None)]
