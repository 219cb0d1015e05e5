"""Trainings that run one after the other in one Slurm job, and give neither a directory nor a name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from waiting import PATIENCE_S

TRAIN = """
import sys
import numpy as np
import mlflash

with mlflash.Checkpointer(redundancy="none") as ckpt:
    state = {"seed": np.array(int(sys.argv[2]))}
    step = ckpt.restore(state)
    print(step, int(state["seed"]))
    ckpt.save((step or 0) + 1, state).wait()
"""


def test_none_restores_what_another_one_has_saved(shm: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    env = {**os.environ, "SLURM_JOB_ID": "71", "MLFLASH_MEMORY": str(shm)}
    env.pop("MLFLASH_JOB", None)

    def run(*words: str) -> tuple[str, str]:
        command = [sys.executable, str(script), *words]
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip(), done.stderr

    assert run("--seed", "1") == ("None 1", "")
    said, warned = run("--seed", "2")
    (mine, other) = re.findall(r"slurm-71-[0-9a-f]{8}", warned)
    assert said == "None 2" and f"of others in this Slurm job: {other}. If it is one of them" in warned
    assert {mine, other} == {path.name for path in shm.glob("mlflash-*/slurm-71-*")}
    assert run("--seed", "1") == ("1 1", "") and run("--seed", "2") == ("1 2", "")
