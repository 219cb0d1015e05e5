"""Couriers of trainers without MPI: what becomes of saves when they die, when ranks leave, and at their start."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import needs
import pytest
import small_blocks
from harness import SUPPORT, Launch, PlainRanks, Result
from processes import left_here, plain_environment
from waiting import PATIENCE_S, until

from mlflash.launch.courier_mpi import named_after
from mlflash.run.processes import mpiexec
from mlflash.state import layout
from mlflash.telemetry.heartbeat import live_jobs, read_heartbeats
from mlflash.tools import doctor_checks
from mlflash.tools.top import state_of

pytestmark = needs.MPI


LARGEST = 60_000_000  # bytes


class Jobs:
    def __init__(self, shm: Path):
        self._shm, self._launches = shm, 0

    def start(self, ranks: int, program: str, **spec: Any) -> Launch:
        """Start trainers, without `python -m mpi4py`."""
        self._launches += 1
        out = self._shm / f"out-{self._launches}"
        out.mkdir()
        settings = {"job": "j", "timeout_s": 30.0}
        settings |= spec.pop("settings", {})
        environment = small_blocks.environment(spec.pop("block_nbytes", 65_536))
        environment |= {"OUT": str(out), "TMPDIR": str(out), "OMP_NUM_THREADS": "1"}
        environment |= {"MLFLASH_MEMORY": str(self._shm), "RANKS_PER_NODE": "1"}
        script = [sys.executable, str(SUPPORT / "on_node.py"), sys.executable, str(SUPPORT / "courier_worker.py")]
        arguments = json.dumps({"program": program, "settings": settings, **spec})
        command, environment = mpiexec(ranks, [*script, arguments], environment)
        return Launch(command, environment, out)

    def run(self, ranks: int, program: str = "train", **spec: Any) -> Result:
        result = self.start(ranks, program, **spec).wait()
        assert not result.returncode, result.log
        return result


@pytest.fixture
def jobs(shm: Path) -> Jobs:
    return Jobs(shm)


@pytest.mark.parametrize("kills", ["idle", "busy", "twice"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_killed_courier_is_a_warning_and_the_next_one_goes_on(jobs: Jobs, ranks: int, kills: str) -> None:
    result = jobs.run(ranks, kills=kills)
    again = result.of("again")
    assert len(again) == len(result.of("end")) and len({record["step"] for record in again}) == 1, result.log
    assert len(result.of("failed")) <= 2 * len(again)
    said = [record["text"] for record in result.of("log") if record["rank"] == 1 and record["level"] == "WARNING"]
    assert any("the courier of rank 1" in text and "training goes on" in text for text in said), result.log
    lost = [record["report"]["counts"]["couriers lost"] for record in result.of("end")]
    assert all(count in ((1, 2) if kills == "twice" else (1,)) for count in lost), lost
    restored = jobs.run(len(again)).of("restored")
    assert {record["step"] for record in restored} == {again[0]["step"]} and all(r["same"] for r in restored)


@pytest.mark.parametrize("kills", [
    "agent 0", pytest.param("agent 1", marks=pytest.mark.gate), "first agent 0", "first agent 1",
    "meeting agent 0", "meeting agent 1",
])  # fmt: skip
def test_an_agent_that_is_killed_again_while_the_next_one_starts_ends_no_saving(jobs: Jobs, kills: str) -> None:
    result = jobs.run(2, kills=kills)
    again = result.of("again")
    assert len(again) == len(result.of("end")) == 2 and len({record["step"] for record in again}) == 1, result.log
    restored = jobs.run(2).of("restored")
    assert {record["step"] for record in restored} == {again[0]["step"]} and all(r["same"] for r in restored)


@pytest.mark.parametrize("point", ["transfer.arrived", "commit.agreed", "commit.recorded"])
def test_all_ranks_hear_the_same_of_a_courier_whose_mpi_fails(jobs: Jobs, point: str) -> None:
    committed = jobs.run(3, "mpi_fails", point=point).of("committed")
    by_rank = [[record["step"] for record in committed if record["rank"] == rank] for rank in range(3)]
    assert by_rank[0] == by_rank[1] == by_rank[2] and {1, 4} <= {*by_rank[0]}, by_rank
    assert point != "commit.recorded" or 2 in by_rank[0]
    restored = jobs.run(3).of("restored")
    assert {record["step"] for record in restored} == {4} and all(record["same"] for record in restored)


@pytest.mark.parametrize(("ranks", "redundancy"), [(2, "copy"), (3, "copy"), (3, "xor:3")])
def test_a_courier_takes_at_most_60_mb_besides_slots(jobs: Jobs, ranks: int, redundancy: str) -> None:
    as_by_default = layout.BLOCK_NBYTES
    weights = jobs.run(ranks, "weigh", settings={"redundancy": redundancy}, block_nbytes=as_by_default).of("weight")
    assert len(weights) == ranks
    for weight in weights:
        assert weight["slots"] > 3 << 24, "too little was saved to show anything"
        assert weight["courier"]["pss"] < LARGEST and weight["agent"]["rss"] < LARGEST, weight
        # With parity, the blocks that are being coded are in memory besides: twice three of each lane, and no slot.
        blocks = 12 << 20 if redundancy == "xor:3" else 0
        assert weight["courier"]["rss"] < LARGEST + blocks, weight


def test_couriers_that_cannot_start_mpi_say_so_on_all_ranks(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("MPIR_CVAR_CH4_NETMOD", "ofi"), ("FI_PROVIDER", "of nobody")):
        monkeypatch.setenv(name, value)
    result = jobs.run(2, "fail_to_start")
    failed = result.of("failed")
    assert len(failed) == 2 and all("could not start MPI" in record["why"] for record in failed), result.log
    assert all("MLFLASH_INTERFACE names the one to use" in record["why"] for record in failed)
    assert result.log.count("Fatal error in internal_Init") == 2, "once on each rank"


@pytest.mark.parametrize("dies", [0, 1])
def test_all_hear_of_a_rank_whose_couriers_die_at_once(jobs: Jobs, dies: int) -> None:
    result = jobs.run(2, "fail_to_start", dies=dies)
    failed = {record["rank"]: record for record in result.of("failed")}
    assert len(failed) == 2 and all(record["seconds"] < PATIENCE_S / 2 for record in failed.values()), result.log
    assert "could not be started" in failed[dies]["why"], failed


def test_a_courier_is_seen_beside_its_trainer_and_after_it(jobs: Jobs, shm: Path) -> None:
    job = jobs.start(2, "stay")
    up = lambda: [record for record in job.records() if record["event"] == "up"]
    until(lambda: len(up()) == 2 or not job.running, "both ranks to save")
    ranks = up()
    assert len(ranks) == 2, job.records()
    pids = {record["courier"] for record in ranks}
    assert doctor_checks.running().keys() >= pids
    words = lambda: {word for found in doctor_checks.couriers_here(None) for word in found.fill(found.text).split()}
    assert not words() & {str(pid) for pid in pids}
    assert all(record["is_a"].startswith(f"process (pid {record['courier']}, ") for record in ranks)
    for record in ranks:
        os.kill(record["courier"], signal.SIGSTOP)  # as one that works on what its trainer has left
    try:
        for record in ranks:  # alone: the end of a launch ends its couriers, too
            os.kill(record["trainer"], signal.SIGKILL)
        until(lambda: words() >= {str(pid) for pid in pids}, "all that is left over")
        memories = [str(memory) for memory in shm.glob("node*")]
        heard = [heartbeat for memory in memories for heartbeat in read_heartbeats(memory, "j").heartbeats]
        assert [live_jobs(memory) for memory in memories] == [["j"], ["j"]]
        assert not any(heartbeat["alive"] for heartbeat in heard), "trainers are gone"
        assert {state_of(heartbeat) for heartbeat in heard} == {"gone"}
    finally:
        for record in ranks:
            os.kill(record["courier"], signal.SIGCONT)
        job.kill()
    until(lambda: not doctor_checks.running().keys() & pids, "couriers to end")
    assert live_jobs(str(shm)) == []


def test_checkpointers_that_are_opened_and_closed_leave_nothing(jobs: Jobs) -> None:
    assert len(jobs.run(2, "cycle", times=25).of("end")) == 2
    assert not left_here(), "agents or couriers"


def test_mpi_that_is_started_too_late_is_refused(jobs: Jobs) -> None:
    result = jobs.run(2, "later")
    assert len(result.of("end")) == 2
    for record in result.of("later"):
        assert len(record["said"]) == 3 and not record["started"]
        assert all(text.startswith("MpiUnavailable: MPI cannot be started") for text in record["said"])
        assert all("must initialize it before it makes a Checkpointer" in text for text in record["said"])
    (alone,) = jobs.run(1, "later").of("later")
    assert not alone["said"], "one rank has used nothing of the launcher's"


@pytest.mark.parametrize("late", [False, True])
def test_no_rank_goes_on_in_what_a_killed_courier_was_in(jobs: Jobs, late: bool) -> None:
    job = jobs.start(3, "out_of_step", late=late)
    inside = {record["rank"]: record["courier"] for record in job.wait_for("inside", 3)}
    os.kill(inside[1], signal.SIGKILL)
    result = job.wait()
    assert not result.returncode, result.log
    assert [record["rank"] for record in result.of("closed")] == [0, 1, 2] and not result.of("agreed"), result.log
    assert all("started anew during this call" in record["why"] for record in result.of("closed"))
    assert [record["step"] for record in result.of("restored")] == [1] * 3
    assert all(record["same"] for record in result.of("restored"))
    assert len({record["step"] for record in result.of("end")}) == 1


@pytest.mark.parametrize(("point", "dies"), [
    pytest.param("transfer.arrived", "protect.sealed", marks=pytest.mark.gate), ("commit.agreed", "commit.agreed"),
])  # fmt: skip
def test_what_is_left_of_an_abandoned_save_commits_nothing_of_the_next_one(jobs: Jobs, point: str, dies: str) -> None:
    job = jobs.start(3, "abandoned", point=point, dies=dies)
    result = job.wait()
    gave_up = {record["rank"]: record for record in result.of("gave up")}
    assert gave_up.keys() >= {1}, result.log
    assert all(record["ranks"] == [1] and record["seconds"] < 60 for record in gave_up.values()), gave_up
    assert re.search(r"the courier of this rank \(pid \d+\) does not answer", gave_up[1]["why"])
    before = result.of("restored")
    assert len(before) == 3, result.log
    (old,) = {record["step"] for record in before}
    assert old in (1, 2) and all(record["content"] == [old] for record in before), before
    assert result.returncode, "it was not killed"
    after = jobs.run(3, "look").of("restored")
    assert [record["rank"] for record in after] == [0, 1, 2]
    (found,) = {(record["step"], *record["content"]) for record in after}
    assert found in [(old, old), (old + 1, 101 + old)], (before, after)


# A rank leaves its job while others go on, without a launcher that would end them


def one_leaves(shm: Path, how: str) -> PlainRanks:
    settings = {"memory": str(shm), "job": "j", "timeout_s": PATIENCE_S}
    spec = json.dumps({"program": "one_leaves", "settings": settings, "how": how})
    return PlainRanks(shm, 3, [sys.executable, str(SUPPORT / "courier_worker.py"), spec])


@pytest.mark.parametrize("how", ["raises", "interrupted"])
def test_an_exception_on_one_rank_ends_the_others_which_wait_for_it_for_ever(shm: Path, how: str) -> None:
    with one_leaves(shm, how) as job:
        alone = -signal.SIGINT if how == "interrupted" else 1  # Python ends by the signal
        assert job.wait() == [1, alone, 1], job.log
        errors = [record["text"] for record in job.records("log") if record["level"] == "ERROR"]
        name = "KeyboardInterrupt" if how == "interrupted" else "ValueError: a fault of the training"
        wanted = f"rank 1 has left the job: {name}"
        assert [text for text in errors if wanted in text and "ends, too" in text] == errors
        assert len(errors) == 2 and not [record for record in job.records("log") if record["rank"] == 1]
    until(lambda: not left_here(), "agents and couriers to end")


@pytest.mark.parametrize("how", ["killed", "terminated", "hung up", "exits at once", "executes"])
def test_who_ends_without_a_word_is_named_and_others_train_on(shm: Path, how: str) -> None:
    with one_leaves(shm, how) as job:
        assert [job.processes[rank].wait(PATIENCE_S) for rank in (0, 2)] == [0, 0], job.log
        assert sorted((record["rank"], record["held"]) for record in job.records("end")) == [(0, 0), (2, 0)]
        for record in job.records("failed"):
            assert "rank 1 has left the job" in record["why"]
        warnings = [record["text"] for record in job.records("log") if record["level"] == "WARNING"]
        assert sum("nothing is saved any more: rank 1 has left the job" in text for text in warnings) == 2, warnings
    until(lambda: not left_here(), "agents and couriers to end")


# The start

SHM = Path("/dev/shm")
TUNING = {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}


def trainers(folder: Path, size: int, do: str) -> PlainRanks:
    """Start trainers that only start their couriers."""
    program = [sys.executable, str(SUPPORT / "launch_trainer.py"), json.dumps({"folder": str(folder), "do": do})]
    return PlainRanks(folder, size, program, plain_environment(**TUNING))


def test_who_has_not_come_is_named_and_a_late_rank_is_waited_for_again(tmp_path: Path) -> None:
    with trainers(tmp_path, 3, "late") as ranks:
        assert ranks.wait() == [0] * 3, ranks.log
    for rank in (0, 2):
        waited = json.loads((tmp_path / str(rank)).read_text())
        assert "all ranks to start epoch 2 of their couriers: 1 of 3 have not come" in waited["error"]
        assert waited["ranks"] == [1]
    for rank in range(3):
        total, segments = json.loads((tmp_path / f"total-{rank}").read_text())
        assert total == 3 and not [name for name in segments if (SHM / name).exists()]


def test_a_courier_that_waits_in_init_is_killed_in_time(tmp_path: Path) -> None:
    """Though its trainer lives; the agent ends with the last trainer."""
    with trainers(tmp_path, 2, "alone_in_init"):
        until(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists(), "both have waited")
        waited = json.loads((tmp_path / "0").read_text())
        agent, courier = (Path(f"/proc/{pid}") for pid in waited["pids"])
        assert "to initialize MPI" in waited["error"]
        until(lambda: not courier.exists(), "the courier is gone")
        assert agent.exists()
    until(lambda: not agent.exists(), "the agent is gone")
    assert not [name for name in named_after(waited["epoch"], 0) if (SHM / name).exists()]
