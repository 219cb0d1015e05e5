"""`mlflash bench` as a program, and what its ranks do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bench_reports import MLFLASH, check
from processes import ran

from mlflash.run.processes import mpiexec
from mlflash.tools.bench_rank import RESULT


@pytest.mark.timeout(300)
def test_two_ranks_on_one_host_measure_everything_and_leave_nothing(shm: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    words = [MLFLASH, "bench", "--size", "1MiB", "--out", out, "--memory", shm]
    command, environment = mpiexec(2, [*map(str, words)])
    done = ran(*command, env=environment, cwd=tmp_path, timeout=280)
    report = json.loads(out.read_text())
    check(report)
    assert report["settings"] == {"ranks": 2, "nodes": 2, "emulated": True, "size_nbytes": 1 << 20, "repetitions": 5}
    assert f"Nothing was sent. The report is in {out}" in done.stdout
    assert not list(shm.glob("mlflash-bench-*")) and [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_what_does_not_fit_into_the_time_is_reported_as_not_run(shm: Path, tmp_path: Path) -> None:
    done = ran(MLFLASH, "bench", "--minutes", "1e-6", "--memory", shm, "--json", cwd=tmp_path, code=1)
    report = json.loads(done.stdout)
    assert report == json.loads((tmp_path / "mlflash-bench.json").read_text())
    assert report["complete"] and not report["figures"]
    assert len(report["not_run"]) == 10 and all("of --minutes" in each["why"] for each in report["not_run"])


def test_a_rank_that_restores_other_bits_is_a_failure(shm: Path) -> None:
    """The arrays follow from the rank: as another rank, it does not get what it expects."""
    assert "arrays" not in task(shm, "saves", repetitions=1)
    error = task(shm, "relaunched", rank=1, code=1)
    assert error == "other bits were restored than those of step 2"


def test_the_measurements_of_a_gpu_run_dry_on_the_cpu(shm: Path) -> None:
    samples = json.loads(task(shm, "gpu", repetitions=2, device="cpu").removeprefix(RESULT))["samples"]
    names = {f"{name} {what}" for name in ("eager", "lazy") for what in ("stall", "commit")}
    assert samples.keys() == names | {"device to host before eager", "device to host before lazy"}
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in samples.values())


def task(shm: Path, name: str, rank: int = 0, code: int = 0, **more: Any) -> str:
    """Do a task alone, and return its last line."""
    settings = {"job": "j", "memory": str(shm), "redundancy": "none", "strict": True}
    words = json.dumps({"task": name, "rank": rank, "nbytes": 1 << 20, "settings": settings, **more})
    done = subprocess.run([sys.executable, "-m", "mlflash.tools.bench_rank", words], input="\n", env=os.environ,
                          capture_output=True, text=True, timeout=100, check=False)  # fmt: skip
    assert done.returncode == code, done.stderr
    return (done.stderr if code else done.stdout).strip().splitlines()[-1]
