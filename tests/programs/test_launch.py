"""Trainers that start their couriers with one call, under what launches them: real launchers, MPICH and processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import needs
import pytest
from harness import SUPPORT
from processes import free_port, started_by
from waiting import PATIENCE_S, until

from mlflash.wireup.mpich_segments import named_after

SHM = Path("/dev/shm")

pytestmark = [
    needs.MPI,
    pytest.mark.skipif(os.environ.get("MLFLASH_TEST_MPI") == "openmpi", reason="needs MPICH: Open MPI speaks no PMI-1"),
]


def lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


class Job:
    def __init__(self, folder: Path):
        self.folder = folder
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, command: Sequence[str], names: Mapping[str, str], **options: Any) -> subprocess.Popen[bytes]:
        """Start a launcher, or a trainer without one."""
        left = ("PMI", "SLURM", "OMPI", "MASTER_", "TORCHELASTIC", "RANK", "WORLD_SIZE", "LOCAL_")
        plain = {name: value for name, value in os.environ.items() if not name.startswith(left)}
        tuning = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp", "OMP_NUM_THREADS": "1"}
        environment = {**plain, **tuning, "PYTHONWARNINGS": "error", **names}
        program = [str(SUPPORT / "launch_trainer.py"), json.dumps({"folder": str(self.folder), **options})]
        self.started.append(
            subprocess.Popen([*command, *program], env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
        )
        return self.started[-1]

    def plain(self, size: int, ranks: Sequence[int] | None = None, **options: Any) -> list[subprocess.Popen[bytes]]:
        """Start processes that only have what torch's launcher would have told them."""
        names = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        which = range(size) if ranks is None else ranks
        return [self.start([sys.executable], {**names, "RANK": str(rank)}, **options) for rank in which]

    def wait(self) -> list[int]:
        return [process.wait(PATIENCE_S) for process in self.started]

    def said(self, *ranks: int) -> list[dict[str, Any]]:
        return [json.loads((self.folder / str(rank)).read_text()) for rank in ranks]

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                for pid in [*started_by({process.pid}), process.pid]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            process.wait(PATIENCE_S)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    job.close()


def test_who_has_not_come_is_named_and_a_late_rank_is_waited_for_again(job: Job) -> None:
    job.plain(3, do="late")
    assert job.wait() == [0] * 3
    for one in job.said(0, 2):
        assert "all ranks to start epoch 2 of their couriers: 1 of 3 have not come" in one["error"]
        assert one["ranks"] == [1]
    for rank in range(3):
        total, segments = json.loads((job.folder / f"total-{rank}").read_text())
        assert total == 3 and not [name for name in segments if (SHM / name).exists()]


def test_a_courier_that_waits_in_init_is_killed_in_time(job: Job) -> None:
    """Though its trainer lives; the zygote ends with the trainer."""
    names = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    zero = job.start([sys.executable], {**names, "RANK": "0"}, do="alone_in_init", up_s=0.5)
    job.start([sys.executable], {**names, "RANK": "1"}, do="alone_in_init", up_s=0.5, entry="wireup_courier:before_mpi")
    until(lambda: (job.folder / "0").exists() and (job.folder / "1").exists(), "both have waited")
    (said,) = job.said(0)
    zygote, courier = said["pids"]
    assert "to initialize MPI" in said["error"]
    until(lambda: not lives(courier), "the courier is gone")
    assert lives(zygote)
    zero.kill()
    until(lambda: not lives(zygote), "the zygote is gone")
    assert not [name for name in named_after(said["epoch"], 0) if (SHM / name).exists()]
