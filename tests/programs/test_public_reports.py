"""What users of other libraries have reported, done to mlflash: each with the result that they had expected."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waiting import PATIENCE_S

from mlflash import Checkpointer


def options(memory: Path) -> dict[str, Any]:
    return {"memory": str(memory), "redundancy": "none", "job": "report"}


def finish(drained: dict[str, Any], last: int) -> int | None:
    state = {"w": np.zeros(9, int)}
    with Checkpointer(**drained) as ckpt:
        begun = ckpt.restore(state)
        assert state["w"].tolist() == [begun or 0] * 9
        for step in range((begun or 0) + 10, last + 1, 10):
            ckpt.save(step, {"w": np.full(9, step)}).wait()
    return begun


def lose_memory(shm: Path) -> None:
    shutil.rmtree(shm / f"mlflash-{os.getuid()}")


def test_the_last_step_of_a_run_that_ends_by_itself_is_in_the_directory(
    shm: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """NVIDIA-NeMo/Megatron-Bridge#5922: a save in memory counted as the one that is due when training ends."""
    drained = options(shm) | {"directory": str(shm / "kept"), "drain_every": 10}
    begun = []
    for last in (30, 50, 50):
        begun.append(finish(drained, last))
        lose_memory(shm)
    assert begun == [None, 30, 50]
    assert sorted(path.name for path in (shm / "kept").iterdir()) == ["step-00000030", "step-00000050"]
    assert "in memory only" not in caplog.text


def test_the_last_step_of_a_killed_run_is_in_the_directory_after_a_relaunch_that_has_nothing_left_to_do(
    shm: Path,
) -> None:
    """NVIDIA-NeMo/Megatron-Bridge#5922, where the relaunch restores the last step, and so saves nothing."""
    drained = options(shm) | {"directory": str(shm / "kept"), "drain_every": 10}
    ended = run_to_step_30(drained, "os.kill(os.getpid(), signal.SIGKILL)")
    assert ended.returncode == -signal.SIGKILL and not (shm / "kept").exists()
    for _ in range(2):  # the second one drains nothing: it is there
        assert finish(drained, 30) == 30
        assert [path.name for path in (shm / "kept").iterdir()] == ["step-00000030"]
    lose_memory(shm)
    assert finish(drained, 30) == 30


@pytest.mark.parametrize(("end", "why"), [
    ("with ckpt: next(iter([]))", "an exception ended the training"),
    ("with ckpt: sys.exit(0)", "an exception ended the training"),
    ("pass", "this Checkpointer was left open"),
])  # fmt: skip
def test_a_run_that_ends_without_its_last_drain_says_that_its_last_step_is_in_memory_only(
    shm: Path, end: str, why: str
) -> None:
    """NVIDIA-NeMo/Megatron-Bridge#5922, where other ranks may go on, so that no rank can wait for a drain."""
    drained = options(shm) | {"directory": str(shm / "kept"), "drain_every": 10}
    ended = run_to_step_30(drained, end)
    assert ended.stderr.count("in memory only") == 1, ended.stderr
    assert f"step 30 is in memory only, and not in {shm / 'kept'}: {why}, so close() did not drain it" in ended.stderr
    assert finish(drained, 30) == 30
    is_there = run_to_step_30(drained | {"job": "other"}, f"ckpt.drain().wait(); {end.removeprefix('with ckpt: ')}")
    assert "in memory only" not in is_there.stderr and (shm / "kept" / "step-00000030.1").exists(), is_there.stderr


def run_to_step_30(drained: dict[str, Any], end: str) -> subprocess.CompletedProcess[str]:
    """Save steps 10, 20 and 30 in a process that then does a line of Python."""
    program = f"""if True:
        import os, signal, sys
        import numpy as np
        from mlflash import Checkpointer
        ckpt = Checkpointer(**{drained!r})
        for step in (10, 20, 30):
            ckpt.save(step, {{"w": np.full(9, step)}}).wait()
        {end}
    """
    return subprocess.run([sys.executable, "-c", program], check=False, timeout=PATIENCE_S, capture_output=True,
                          text=True)  # fmt: skip
