"""How many files and classes a save crosses: what adds one takes one out."""

from __future__ import annotations

import re
import subprocess
import sys

import needs
import pytest
from harness import TESTS
from waiting import PATIENCE_S

MOST_FILES, MOST_CLASSES = 41, 61  # one or two of them are a matter of time


@pytest.mark.gate
@needs.MPI
def test_the_way_of_a_save_grows_no_longer() -> None:
    command = [sys.executable, str(TESTS.parent / "tools" / "way_of_a_save.py"), "--list"]
    done = subprocess.run(command, timeout=PATIENCE_S, capture_output=True, text=True, check=True)
    files, classes = map(int, re.findall(r"(\d+) files and (\d+) classes", done.stdout)[0])
    assert files <= MOST_FILES and classes <= MOST_CLASSES, done.stdout
