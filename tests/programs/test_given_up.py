"""A wait for the couriers of others ends when one of these is lost, and not with its deadline."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import needs
from processes import left_here
from waiting import PATIENCE_S, until

pytestmark = [needs.MPI, needs.PMI_1]
PROGRAM = Path(__file__).with_name("given_up_rank.py")


def test_who_waits_for_couriers_of_others_is_interrupted() -> None:
    of_launch = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    ran = subprocess.run([sys.executable, str(PROGRAM)], env={**os.environ, **of_launch}, timeout=PATIENCE_S,
                         capture_output=True, text=True)  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    until(lambda: not left_here(), lambda: f"the end of {left_here()}")
