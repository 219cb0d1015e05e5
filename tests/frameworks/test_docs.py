"""The complete scripts in the pages on frameworks run as they stand, and a second time go on from memory."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from mlflash.demo.launch import mpiexec

DOCS = Path(__file__).parents[2] / "docs"

# What the framework, or mlflash, says of a start from memory.
FROM_MEMORY = {"lightning": "from the checkpoint at mlflash:20"}


def start(script: Path, last: int, memory: Path) -> str:
    program = [sys.executable, "-W", "ignore", "-m", "mpi4py", str(script), str(last)]
    environment = {"MLFLASH_MEMORY": str(memory), "MLFLASH_RANKS_PER_NODE": "1", "TMPDIR": str(memory)}
    line, env = mpiexec(2, program, environment)
    result = subprocess.run(line, env=env, cwd=script.parent, timeout=100, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


@pytest.mark.parametrize("page", FROM_MEMORY)
def test_a_script_goes_on_from_memory_when_it_is_started_again(page: str, shm: Path, tmp_path: Path) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", (DOCS / f"{page}.md").read_text(), re.M | re.S)
    script = tmp_path / "train.py"
    script.write_text(block)
    assert start(script, 20, shm).count("begins after step 0\n") == 2
    again = start(script, 25, shm)
    assert again.count("begins after step 20\n") == 2 and FROM_MEMORY[page] in again
