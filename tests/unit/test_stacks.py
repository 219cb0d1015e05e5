"""What becomes of a test that nothing interrupts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from ci.stacks import FAILED

HANGS = """
import ctypes
from ci import stacks
stacks._GRACE_S = 0.5

def test_hangs():
    lock = ctypes.create_string_buffer(64)
    hold = ctypes.{library}(None).pthread_mutex_lock
    hold(lock), hold(lock)
"""


@pytest.mark.parametrize("library", ["CDLL", "PyDLL"])
@pytest.mark.slow
def test_a_test_that_hangs_in_a_library_ends_its_process_and_is_named(library: str, tmp_path: Path) -> None:
    """One that gives other threads the interpreter's lock meanwhile, and one that does not.

    One at a time: the stacks of two processes are mixed letter by letter where both print them to one file.
    """
    tests = Path(__file__).parents[1]
    (tmp_path / "conftest.py").symlink_to(tests / "conftest.py")
    (tmp_path / "test_it.py").write_text(HANGS.format(library=library))
    command = [sys.executable, "-m", "pytest", f"--rootdir={tmp_path}", "-n1", "-o", "timeout=0.5",
               "-o", f"pythonpath={tests}", "-p", "no:cacheprovider", str(tmp_path)]  # fmt: skip
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "crashed while running 'test_it.py::test_hangs'" in ran.stdout, ran.stdout + ran.stderr
    assert "1 failed" in ran.stdout and "in test_hangs" in ran.stderr, ran.stdout + ran.stderr
    assert f"{FAILED}test_it.py::test_hangs" in ran.stderr, "what is known of it when the run goes on without an end"
