"""`mlflash courier`: couriers that another process has started outlive all that a trainer has started."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import needs
import pytest
from harness import SUPPORT, PlainRanks
from processes import started_by
from waiting import PATIENCE_S, until

from mlflash.doctor import couriers
from mlflash.memory.courier_process import works_for
from mlflash.wireup.own_process import opened
from mlflash.wireup.zygote_client import ZygoteClient
from mlflash.wireup.zygote_host import HostedProcess

pytestmark = needs.MPI
BIN = Path(sys.executable).parent


class Job:
    """Two trainers, and what hosts their couriers."""

    def __init__(self, root: Path):
        self.root, self._launches = root, 0
        self.environment = {**os.environ, "MLFLASH_MEMORY": str(root), "MLFLASH_JOB": "j", "OMP_NUM_THREADS": "1"}
        self.environment.pop("SLURM_JOB_ID", None)
        self.hosts: list[subprocess.Popen[str]] = []
        self.trainers: list[subprocess.Popen[bytes]] = []

    def host(self) -> subprocess.Popen[str]:
        """Start a host and wait until it is one."""
        self.hosts.append(subprocess.Popen([BIN / "mlflash", "courier"], env=self.environment, text=True,
                                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT))  # fmt: skip
        output = self.hosts[-1].stdout
        assert output is not None and output.readline() == "couriers of this job start here now\n"
        return self.hosts[-1]

    def start(self, **spec: Any) -> None:
        self._launches += 1
        out = self.root / f"out-{self._launches}"
        out.mkdir()
        settings = {"memory": str(self.root), "job": "j", "timeout_s": PATIENCE_S}
        program = [sys.executable, str(SUPPORT / "dying_trainer.py"), json.dumps({"settings": settings, **spec})]
        self.ranks = PlainRanks(out, 2, program, self.environment)
        self.trainers = self.ranks.processes

    def zygotes(self) -> set[int]:
        """The zygotes of the trainers."""
        trainers = {trainer.pid for trainer in self.trainers}
        return {pid for pid, pids in couriers.running().items() if trainers.issuperset(pids)}

    def close(self) -> None:
        everything = [*self.trainers, *self.hosts]
        for pid in started_by({process.pid for process in everything}):
            os.kill(pid, signal.SIGKILL)
        for process in everything:
            process.kill()
            process.communicate(timeout=PATIENCE_S)


@pytest.fixture
def job(shm: Path) -> Iterator[Job]:
    job = Job(shm)
    yield job
    job.close()


def test_what_was_handed_over_is_committed_though_all_that_trainers_started_is_killed(job: Job) -> None:
    host = job.host()
    job.start(who="trainer", how="terminal closed")
    until(lambda: len(job.ranks.records("victim")) == 2, "the trainers to have saved")
    zygotes = job.zygotes()
    assert zygotes <= started_by({host.pid}) and len(zygotes) == 2
    trainers = {trainer.pid for trainer in job.trainers}
    assert not started_by(trainers), "what is to be killed with them"
    running = couriers.running()
    assert {works_for(pid) for pid, (parent, _) in running.items() if parent in zygotes} == trainers
    left = " ".join(found.fill(found.text) for found in couriers.couriers_here(None)).split()
    assert not set(left) & {str(pid) for pid, (_, trainer) in running.items() if trainer in trainers}
    for pid in trainers:
        os.kill(pid, signal.SIGKILL)
    for trainer in job.trainers:
        trainer.wait(PATIENCE_S)
    until(lambda: not started_by({host.pid}), "couriers to commit, and to end")
    job.start()
    assert job.ranks.wait() == [0, 0]
    assert [(record["step"], record["same"]) for record in job.ranks.records("restored")] == [(2, True)] * 2
    host.send_signal(signal.SIGTERM)
    assert host.wait(PATIENCE_S) == 0
    assert not list(job.root.glob("mlflash-*/couriers-*")), "its sockets"


def test_a_host_that_is_told_to_end_waits_for_its_couriers_and_a_killed_one_is_replaced(job: Job) -> None:
    first = job.host()
    again = subprocess.run([BIN / "mlflash", "courier", "--job", "j", "--memory", str(job.root)], capture_output=True,
                           text=True, timeout=PATIENCE_S, check=False)  # fmt: skip
    assert again.returncode == 1 and "a `mlflash courier` of this job already runs" in again.stderr
    first.kill()
    first.wait(PATIENCE_S)
    job.start()  # each has a zygote of its own: there is nobody at the socket
    assert job.ranks.wait() == [0, 0]
    second = job.host()
    job.start(who="trainer", how="terminal closed")
    until(lambda: len(job.ranks.records("victim")) == 2, "the trainers to have saved")
    second.send_signal(signal.SIGTERM)
    assert second.poll() is None and len(job.zygotes()) == 2, "it waits for its couriers"
    for trainer in job.trainers:
        trainer.kill()
        trainer.wait(PATIENCE_S)
    assert second.wait(PATIENCE_S) == 0
    job.start()
    assert job.ranks.wait() == [0, 0]
    assert [record["step"] for record in job.ranks.records("restored")] == [2, 2]


def test_trainers_that_come_all_at_once_are_all_served(job: Job) -> None:
    host = job.host()
    environment = {**job.environment, "MUCH": "x" * 100_000}  # more than one piece of a stream
    with ThreadPoolExecutor(12) as threads:
        begin = lambda _: ZygoteClient(["mlflash.courier.main:run"], environment, mpi=False)
        zygotes = list(threads.map(begin, range(24)))
    try:
        assert {zygote.process.pid for zygote in zygotes} <= started_by({host.pid}), "one was not started by the host"
    finally:
        for zygote in zygotes:
            zygote.stop(PATIENCE_S)


def test_who_says_nothing_to_a_host_delays_it_for_a_moment(job: Job) -> None:
    host = job.host()
    (path,) = job.root.glob("mlflash-*/couriers-*")
    with opened(path.parent) as folder, socket.socket(socket.AF_UNIX) as silent:
        silent.connect(f"{folder}/{path.name}")
        zygote = ZygoteClient(["mlflash.courier.main:run"], job.environment, mpi=False)
        zygote.stop(PATIENCE_S)
    assert isinstance(zygote.process, HostedProcess), "the host did not start it"
    assert host.poll() is None


def test_a_process_that_knows_no_job_is_told_so(shm: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("MLFLASH_JOB", "SLURM_JOB_ID")}
    done = subprocess.run([BIN / "mlflash", "courier", "--memory", str(shm)], env=environment, capture_output=True,
                          text=True, timeout=PATIENCE_S, check=False)  # fmt: skip
    assert done.returncode == 2 and "set MLFLASH_JOB" in done.stderr
