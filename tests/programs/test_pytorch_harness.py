"""PyTorch's own multi-process harness on our writer and reader: it spawns the ranks, which have no launcher."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import needs
import pytest
from processes import left_here, plain_environment
from waiting import PATIENCE_S, until

CASES = Path(__file__).with_name("pytorch_cases.py")
pytestmark = [needs.MPI, needs.PMI_1]


def run(shm: Path, case: str) -> subprocess.CompletedProcess[str]:
    environment = plain_environment(MLFLASH_MEMORY=shm, OMP_NUM_THREADS=1, TMPDIR=shm)
    done = subprocess.run([sys.executable, str(CASES), case], env=environment, cwd=shm, text=True,
                          capture_output=True, timeout=PATIENCE_S, check=False)  # fmt: skip
    until(lambda: not left_here(), "the end of all that was started")
    return done


@pytest.mark.parametrize("case", ["TwoRanks.test_fsdp2", "FourRanks.test_hsdp_and_tensor_parallel"])
def test_what_is_saved_is_loaded_bit_for_bit(shm: Path, case: str) -> None:
    done = run(shm, case)
    assert done.returncode == 0 and "\nRan 1 test in " in done.stderr and "\nOK\n" in done.stderr, done.stderr


def test_what_was_saved_before_all_ranks_were_killed_is_loaded_by_the_next_ones(shm: Path) -> None:
    killed = run(shm, "TwoRanks.test_killed")
    assert killed.returncode == 1 and "Expected exit code 0 but got -9" in killed.stderr, killed.stderr
    again = run(shm, "TwoRanks.test_killed")
    assert again.returncode == 0, again.stderr
