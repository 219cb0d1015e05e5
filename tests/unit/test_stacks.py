"""What becomes of a test that nothing interrupts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HANGS = """
import ctypes, stacks
stacks._GRACE_S = 0.5

def test_hangs():
    lock = ctypes.create_string_buffer(64)
    hold = ctypes.{library}(None).pthread_mutex_lock
    hold(lock), hold(lock)
"""


def test_a_test_that_hangs_in_a_library_ends_its_process_and_is_named(tmp_path: Path) -> None:
    """One that gives other threads the interpreter's lock meanwhile, and one that does not."""
    tests = Path(__file__).parents[1]
    (tmp_path / "conftest.py").symlink_to(tests / "conftest.py")
    for library in ("CDLL", "PyDLL"):
        (tmp_path / f"test_{library.lower()}.py").write_text(HANGS.format(library=library))
    command = [sys.executable, "-m", "pytest", f"--rootdir={tmp_path}", "-n2", "-o", "timeout=0.5",
               "-o", f"pythonpath={tests}", "-p", "no:cacheprovider", str(tmp_path)]  # fmt: skip
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    for name in ("test_cdll.py", "test_pydll.py"):
        assert f"crashed while running '{name}::test_hangs'" in ran.stdout, ran.stdout + ran.stderr
    assert "2 failed" in ran.stdout and ran.stderr.count("in test_hangs") >= 2, ran.stdout + ran.stderr
