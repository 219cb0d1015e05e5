"""Trainers that start their couriers with one call, and nothing but the names of torch's launcher: MPICH, processes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import needs
import pytest
from harness import SUPPORT, PlainRanks
from processes import plain_environment
from waiting import until

from mlflash.launch.courier_mpi import named_after

pytestmark = needs.MPI
SHM = Path("/dev/shm")
TUNING = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
Start = Callable[[int, str], PlainRanks]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts so many ranks that do the same."""
    started: list[PlainRanks] = []

    def begin(size: int, do: str) -> PlainRanks:
        program = [sys.executable, str(SUPPORT / "launch_trainer.py"), json.dumps({"folder": str(tmp_path), "do": do})]
        started.append(PlainRanks(tmp_path, size, program, plain_environment(**TUNING)))
        return started[-1]

    yield begin
    for ranks in started:
        ranks.close()


def said(folder: Path, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / str(rank)).read_text())
    return found


def lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_who_has_not_come_is_named_and_a_late_rank_is_waited_for_again(start: Start, tmp_path: Path) -> None:
    ranks = start(3, "late")
    assert ranks.wait() == [0] * 3, ranks.log
    for one in (said(tmp_path, 0), said(tmp_path, 2)):
        assert "all ranks to start epoch 2 of their couriers: 1 of 3 have not come" in one["error"]
        assert one["ranks"] == [1]
    for rank in range(3):
        total, segments = json.loads((tmp_path / f"total-{rank}").read_text())
        assert total == 3 and not [name for name in segments if (SHM / name).exists()]


def test_a_courier_that_waits_in_init_is_killed_in_time(start: Start, tmp_path: Path) -> None:
    """Though its trainer lives; the agent ends with the last trainer."""
    ranks = start(2, "alone_in_init")
    until(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists(), "both have waited")
    waited = said(tmp_path, 0)
    agent, courier = waited["pids"]
    assert "to initialize MPI" in waited["error"]
    until(lambda: not lives(courier), "the courier is gone")
    assert lives(agent)
    for process in ranks.processes:
        process.kill()
    until(lambda: not lives(agent), "the agent is gone")
    assert not [name for name in named_after(waited["epoch"], 0) if (SHM / name).exists()]
