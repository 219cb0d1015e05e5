"""The step of Slurm that starts couriers: ready on each node before ranks start, and no ground for a run to fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlflash.launcher import on_slurm
from mlflash.launcher.launch_system import RunOptions
from mlflash.launcher.on_slurm import CourierHosts, OnSlurm
from mlflash.wireup.zygote_host import READY

OPTIONS = RunOptions(["true"], 2, 1, 0, 0, "j", "/dev/shm", None, True, 0, 1, 0, 0, "")
READY_ON_ONE = f"echo '{READY}'; exec sleep 60"


@pytest.mark.parametrize("text", [READY_ON_ONE, "exit 1"], ids=["one node does not come", "srun fails"])
def test_where_couriers_cannot_be_started_a_warning_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    """In an allocation of two nodes."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "a,b")
    monkeypatch.delenv("MLFLASH_COURIER", raising=False)
    monkeypatch.setattr(on_slurm, "_READY_S", 1.0)
    programs = {"scontrol": "printf 'a\\nb\\n'", "squeue": "echo 7.1 mlflash-couriers",
                "srun": f"echo $$ > {tmp_path}/pid\n{text}", "scancel": f"kill $(cat {tmp_path}/pid)"}  # fmt: skip
    for name, program in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{program}\n")
        (tmp_path / name).chmod(0o700)
    with CourierHosts(OnSlurm("7"), OPTIONS):
        assert "of 2, ranks start their couriers themselves" in caplog.text
