"""Every Python block in docs/ runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
# Their scripts are whole trainings, which are killed: frameworks/test_docs.py, test_quickstart.py,
# test_pytorch_page.py, test_launchers.py.
TRAININGS = {"lightning", "transformers", "deepspeed", "torchtitan", "nemo", "quickstart", "pytorch", "README", "fsdp"}
FIRST = {f"{page}-0" for page in ("using", "dcp", "drain", "keep_alive")}
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}", marks=pytest.mark.gate if f"{page.stem}-{number}" in FIRST else ())
    for page in sorted((REPO / "docs").glob("*.md"))
    if page.stem not in TRAININGS
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S))
]


def run(shm: Path, *words: str, timeout: float = 100) -> None:
    """Run Python there, with its memory; it has to end well."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI", "SLURM"))}
    result = subprocess.run(
        [sys.executable, *words],
        env={**environment, "MLFLASH_MEMORY": str(shm), "OMP_NUM_THREADS": "1"},
        cwd=shm,
        timeout=timeout,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("block", BLOCKS)
def test_the_block_runs(block: str, shm: Path) -> None:
    run(shm, "-W", "error", "-c", block)


@pytest.mark.parametrize("block", [one for one in BLOCKS if str(one.id).startswith("migrating")])
def test_who_comes_from_another_system_runs_it_on_two_ranks_and_starts_it_again(block: str, shm: Path) -> None:
    (shm / "program.py").write_text(block)
    for _ in range(2):
        run(shm, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "program.py", timeout=150)
