"""The step of Slurm that starts couriers: ready on each node before ranks start, and no ground for a run to fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlflash.launcher import on_slurm
from mlflash.launcher.launch_system import RunOptions
from mlflash.launcher.on_slurm import CourierHosts, OnSlurm
from mlflash.wireup.zygote_host import READY

OPTIONS = RunOptions(["true"], 2, 1, 0, 0, "j", "/dev/shm", None, True, 0, 1, 0, 0, "")
ENDS = f"trap 'echo ended >> log; exit 0' TERM\necho '{READY}'\necho a word\n%s\nwhile :; do read -t 0.1 _ < fifo; done"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OnSlurm:
    """An allocation of two nodes; `step` makes what srun does there."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "a,b")
    monkeypatch.setenv("SRUN_CPUS_PER_TASK", "4")
    monkeypatch.delenv("MLFLASH_COURIER", raising=False)
    monkeypatch.chdir(tmp_path)
    program(tmp_path, "scontrol", "printf 'a\\nb\\n'")
    program(tmp_path, "squeue", "echo 7.1 mlflash-couriers; echo 7.2 mlflash-1")
    program(tmp_path, "scancel", 'echo "scancel $*" >> log; [ -f pid ] && kill "$(cat pid)"; rm -f pid')
    return OnSlurm("7")


def program(path: Path, name: str, text: str) -> None:
    (path / name).write_text(f"#!/bin/bash\n{text}\n")
    (path / name).chmod(0o700)


def srun(path: Path, text: str) -> None:
    start = 'echo $$ > pid; echo "${SRUN_CPUS_PER_TASK:-} $*" > words; mkfifo fifo; exec 3<>fifo'
    program(path, "srun", f"{start}\n{text}")


@pytest.mark.parametrize("text", [ENDS % "", "exit 1"], ids=["one node does not come", "srun fails"])
def test_where_couriers_cannot_be_started_a_warning_says_so(
    slurm: OnSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    monkeypatch.setattr(on_slurm, "_READY_S", 1.0)
    srun(tmp_path, text)
    with CourierHosts(slurm, OPTIONS):
        assert "of 2, ranks start their couriers themselves" in caplog.text
