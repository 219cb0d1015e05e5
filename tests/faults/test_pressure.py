"""Too little memory, at every moment: an error or a warning, never SIGBUS or SIGKILL; training goes on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import Cluster, Result
from waiting import until

MIB = 1 << 20
Mount = Callable[[int], Path]


def fill(memory: Path, leave: int = 0) -> Path:
    """Use a memory file system up."""
    filler = memory / "filler"
    with filler.open("wb") as file:
        free = os.statvfs(memory)
        os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize - leave)
    return filler


def outcomes(result: Result, rank: int = 0) -> dict[int, str]:
    """What became of each save of a rank: "committed", or what made it fail."""
    ends = [r for r in result.records if r["rank"] == rank and r["event"] in ("committed", "failed")]
    return {r["step"]: r.get("cause", "committed") for r in ends}


def test_memory_full_at_the_start_costs_the_saves_and_not_the_training(small_memory: Mount, tmp_path: Path) -> None:
    memory = small_memory(200 * MIB)
    filler = fill(memory, leave=MIB)
    cluster = Cluster(memory, out=tmp_path)
    # A trap that nobody reaches: no prepare, so that it is the saves that find no room.
    traps = [{"path": ["reprotect.copied"], "action": "rank"}]
    job = cluster.begin(2, program="keep_saving", last=3, pause=0.1, busy_until="enough", traps=traps)
    job.wait_for("failed", 4)
    filler.unlink()
    job.wait_for("committed", 4)
    (job.out / "enough").touch()
    result = job.wait()
    assert result.returncode == 0, result.log
    assert outcomes(result)[1] == "MemoryTooSmall" and "do not fit into its memory" in result.log
    assert f"free space of {memory}" in result.log
    assert len(result.of("end")) == 2 and list(outcomes(result).values())[-1] == "committed"


def test_a_small_state_is_saved_in_as_little_memory_as_docker_gives(small_memory: Mount, tmp_path: Path) -> None:
    cluster = Cluster(small_memory(64 * MIB), ranks_per_node=1, out=tmp_path)
    result = cluster.train(2, program="keep_saving", last=2, nbytes=1_600_000)
    assert outcomes(result, 0) == outcomes(result, 1) == {1: "committed", 2: "committed"}, result.log


def test_memory_full_in_the_middle_does_not_matter_until_the_state_grows(small_memory: Mount, tmp_path: Path) -> None:
    memory = small_memory(200 * MIB)
    cluster = Cluster(memory, out=tmp_path)
    job = cluster.begin(2, program="keep_saving", last=8, grow_at=6, hold_at=3)
    job.wait_for("committed", 4)
    filler = fill(memory)
    (job.out / "go on").touch()
    result = job.wait()
    assert result.returncode == 0, result.log
    said = outcomes(result)
    assert [said[step] for step in range(1, 6)] == ["committed"] * 5
    assert [said[step] for step in range(6, 9)] == ["MemoryTooSmall"] * 3
    assert [r["steps"] for r in result.of("end")] == [[4, 5]] * 2
    filler.unlink()
    again = cluster.train(2, program="keep_saving", last=7, grow_at=6)
    assert [(r["step"], r["wrong"]) for r in again.of("restored")] == [(5, [])] * 2, again.log
    assert outcomes(again) == {6: "committed", 7: "committed"}


@pytest.mark.parametrize(("point", "transport"), [("room.begun", "p2p"), ("room.created", "rma")])
def test_memory_that_runs_out_while_slots_grow(small_memory: Mount, tmp_path: Path, point: str, transport: str) -> None:
    memory = small_memory(200 * MIB)
    cluster = Cluster(memory, out=tmp_path, transport=transport)
    # Between the look at what is free and the allocation, on one rank; of its slots the first, or the inbox.
    trap = {"path": ["commit.seen", "commit.seen", point], "action": "fill", "rank": 1}
    job = cluster.begin(2, program="keep_saving", last=3, grow_at=3, traps=[trap], pause=0.1, busy_until="enough")
    failed = job.wait_for("failed", 2)
    assert {r["cause"] for r in failed} == {"MemoryTooSmall"}
    assert any("is full" in r["error"] for r in failed)
    (memory / "filler").unlink()
    job.wait_for("committed", 6)  # training and saving went on, and the next save found room
    (job.out / "enough").touch()
    result = job.wait()
    assert result.returncode == 0 and len(result.of("end")) == 2, result.log
    last = max(r["step"] for r in result.of("committed"))
    cluster.wipe(0)
    again = cluster.train(2, program="keep_saving", last=0, grow_at=3)
    assert [(r["step"], r["wrong"]) for r in again.of("restored")] == [(last, [])] * 2, again.log
    assert len(cluster.slot_files()) == 8


def test_memory_that_ran_out_while_slots_grew_costs_no_step(small_memory: Mount, tmp_path: Path) -> None:
    memory = small_memory(200 * MIB)
    cluster = Cluster(memory, out=tmp_path)
    trap = {"path": ["commit.seen", "commit.seen", "room.begun"], "action": "fill", "rank": 1}
    job = cluster.begin(2, program="keep_saving", last=4, grow_at=3, traps=[trap], hold_at=4)
    job.wait_for("failed", 2)
    job.kill()
    (memory / "filler").unlink()
    cluster.wipe(1)
    result = cluster.train(2, program="keep_saving", last=3, grow_at=3)
    assert [(r["step"], r["wrong"]) for r in result.of("restored")] == [(2, [])] * 2, result.log
    assert outcomes(result) == {3: "committed"}


def test_a_reprotection_that_finds_no_room_is_tried_again_by_later_saves(small_memory: Mount, tmp_path: Path) -> None:
    memory = small_memory(200 * MIB)
    cluster = Cluster(memory, ranks_per_node=1, out=tmp_path)
    cluster.train(4, program="keep_saving", last=2, nbytes=8 * MIB)
    cluster.wipe(0)
    # Room for the slot that is fetched, and not for the copies; checked before anything is allocated.
    filler = fill(memory, leave=10 * MIB)
    job = cluster.begin(4, program="keep_saving", last=3, nbytes=8 * MIB, pause=0.1, busy_until="enough")
    job.wait_for("failed", 4)
    filler.unlink()
    job.wait_for("committed", 8)
    (job.out / "enough").touch()
    result = job.wait()
    assert [(r["step"], r["wrong"]) for r in result.of("restored")] == [(2, [])] * 4, result.log
    assert "the restored step has no full redundancy" in result.log
    cluster.wipe(2)
    last = max(r["step"] for r in result.of("committed"))
    again = cluster.train(4, program="keep_saving", last=0, nbytes=8 * MIB)
    assert [(r["step"], r["wrong"]) for r in again.of("restored")] == [(last, [])] * 4, again.log


def test_a_memory_limit_is_refused_before_the_kernel_kills(small_cgroup: Mount, shm: Path, tmp_path: Path) -> None:
    group = small_cgroup(600 * MIB)
    cluster = Cluster(shm, out=tmp_path)
    into = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
    traps = [{"path": ["reprotect.copied"], "action": "rank"}]
    job = cluster.begin(2, before=into, program="keep_saving", last=2, nbytes=100 * MIB, traps=traps)
    result = job.wait()
    assert result.returncode == 0, result.log  # past the limit it would be 9
    assert f"memory limit of cgroup {group}" in result.log
    assert outcomes(result) == {1: "MemoryTooSmall", 2: "MemoryTooSmall"}
    assert sum(file.stat().st_size for file in cluster.slot_files()) == 0
    small = cluster.begin(2, before=into, program="keep_saving", last=2, nbytes=10 * MIB)
    assert outcomes(small.wait()) == {1: "committed", 2: "committed"}


def test_memory_taken_by_a_dead_job_is_named(small_memory: Mount, tmp_path: Path) -> None:
    memory = small_memory(200 * MIB)
    dead = Cluster(memory, job="yesterday", out=tmp_path)
    dead.train(2, last=2, die_at=2, die="all", nbytes=10 * MIB)
    traps = [{"path": ["reprotect.copied"], "action": "rank"}]
    today = Cluster(memory, job="today", out=tmp_path)
    result = today.train(2, program="keep_saving", last=1, nbytes=30 * MIB, traps=traps)
    assert "`mlflash clean JOB` frees those of a dead one" in result.log, result.log
    assert "    yesterday: 42" in result.log  # two slots of its own and two of the other rank, of 10 MiB
    again = dead.train(2, last=0, nbytes=10 * MIB)
    assert [(r["step"], r["wrong"]) for r in again.of("restored")] == [(2, [])] * 2, again.log


def test_two_jobs_on_the_same_nodes_do_not_see_each_other(shm: Path) -> None:
    clusters = [Cluster(shm, job=name) for name in ("one", "two")]
    jobs = [cluster.begin(2, last=100_000, pause=0.01) for cluster in clusters]
    for job in jobs:
        job.wait_for("committed", 20)
    jobs[0].kill()
    seen = len(jobs[1].records())
    jobs[1].wait_for("committed", seen + 4)
    jobs[1].kill()
    for cluster, job in zip(clusters, jobs, strict=True):
        cluster.wipe(0)
        committed = max(r["step"] for r in job.records("committed"))
        result = cluster.train(2, last=0)
        assert {r["step"] >= committed for r in result.of("restored")} == {True}, result.log
        assert [r["wrong"] for r in result.of("restored")] == [[], []]


def test_a_partner_stopped_for_a_minute_is_late_and_not_lost(shm: Path) -> None:
    options = {"timeout_s": 30_000}
    job = Cluster(shm).begin(2, program="keep_saving", last=3, busy_until="enough", clock=30, options=options)
    job.wait_for("committed", 4)
    job.stop(1)
    end = time.monotonic() + 60 / 30
    until(lambda: time.monotonic() > end, "a minute to pass for the ranks, by whose clock all deadlines are")
    committed = job.records("committed")
    first, second = (max(r["step"] for r in committed if r["rank"] == rank) for rank in (0, 1))
    # One that was on its way may be committed.
    assert first <= second + 1, "a step was committed without the partner"
    job.signal([1], signal.SIGCONT)
    job.wait_for("committed", len(committed) + 4)
    (job.out / "enough").touch()
    result = job.wait()
    assert result.returncode == 0 and not result.of("failed"), result.log
