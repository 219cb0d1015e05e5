"""Jobs that wait, that are late, that leave early, that are started twice or wrongly."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from damage import flip
from harness import Cluster, assert_restored, train_and_die
from processes import ran

import mlflash
from mlflash.state.layout import PAGE_NBYTES


@pytest.mark.parametrize(("ranks", "transport"), [(2, "p2p"), (3, "rma")])
def test_a_stopped_rank_is_named_training_goes_on_and_it_catches_up(shm: Path, ranks: int, transport: str) -> None:
    cluster = Cluster(shm, transport=transport)
    job = cluster.begin(ranks, program="wait_past_deadline", stop_s=3.0)
    job.wait_for("ready", ranks)
    job.stop(ranks - 1)
    (job.out / "stopped").touch()
    job.wait_for("next", ranks - 1)  # nobody waits for the rank that is stopped
    job.signal([ranks - 1], signal.SIGCONT)
    result = job.wait()
    late = result.of("late")
    assert late and late[0]["rank"] == 0, result.log
    for record in late[: ranks - 1]:
        assert record["ranks"] == [ranks - 1]
        assert record["nodes"] == [f"node{ranks - 1}"]
        assert f"waited 3 s for rank {ranks - 1} on node{ranks - 1}" in record["text"]
    for record in result.of("next"):
        if record["rank"] == 0:  # the last commit is untouched, and what is in flight is not used for anything else
            own, inbox = record["slots"][:2], record["slots"][2:]
            assert sorted(own, key=str) == [["busy", None], ["holds", 1]] and ["holds", 1] in inbox
    assert "still waiting for other ranks" in result.of("next")[0]["error"]
    assert all(r["late"] for r in result.of("caught up")), "the late step was not committed after all"
    assert [r["steps"] for r in result.of("end")] in ([[2, 4]] * ranks, [[3, 4]] * ranks), result.log


def test_a_with_block_left_by_an_exception_waits_for_nobody(shm: Path) -> None:
    cluster = Cluster(shm)
    # The other rank hangs, and any wait for it would outlast the launch.
    result = cluster.train(2, program="leave_by_exception")
    assert "training went wrong" in result.log and result.of("raised")
    again = cluster.train(2, last=0, nbytes=10)
    assert "in the checkpoint" in again.log  # other sizes: the step is there, and is not this state
    assert len(cluster.slot_files()) == 8


def test_the_same_job_twice_at_once_is_refused(shm: Path) -> None:
    cluster = Cluster(shm)
    first = cluster.begin(2, last=100_000, pause=0.01)
    first.wait_for("committed", 2)
    second = cluster.train(2, last=1)
    assert second.returncode != 0
    assert "job j is alive on this node: end it first" in second.log
    assert any(f"held by pid {first.pids()[rank]}" in second.log for rank in (0, 1)) and len(first.pids()) == 2
    mlflash_here, memory = Path(sys.executable).with_name("mlflash"), ("--memory", shm / "node0")
    listed = ran(mlflash_here, "jobs", *memory).stdout
    assert listed.splitlines()[-1].startswith("1 job of this user in ") and " j " in listed
    assert ran(mlflash_here, "clean", *memory, "j", code=1).stderr.startswith("j: it is alive (pid ")
    assert len(cluster.slot_files()) == 8
    first.kill()
    (cluster.node(0) / "foreign").write_text("not ours")
    assert "bytes freed" in ran(mlflash_here, "clean", *memory, "--all", "--yes").stdout
    assert len(cluster.slot_files()) == 4, "those of the other node"
    assert (cluster.node(0) / "foreign").read_text() == "not ours"


def test_a_step_restored_too_often_is_skipped_only_when_told(shm: Path) -> None:
    cluster, stuck = Cluster(shm), "step 3 was restored {} times now and nothing newer was committed since"
    train_and_die(cluster, 2, 3)

    def restored(step: int, more: int = 0, **options: object) -> str:
        result = cluster.train(2, more=more, options=options)
        assert [(r["step"], r["wrong"]) for r in result.of("restored")] == [(step, [])] * 2, result.log
        return result.log

    assert "was restored" not in restored(3)
    assert stuck.format(2) in restored(3)
    cluster.wipe(0)
    assert stuck.format(3) in restored(3)  # the count survives a lost node
    assert stuck.format(4) in restored(3, skip_stuck=4)
    taken = "step 3 was restored 4 times and nothing newer was committed since: step 2 is taken instead"
    assert taken in restored(2, skip_stuck=4)
    assert stuck.format(5) in restored(3)  # without skip_stuck it is the newest again
    restored(2, skip_stuck=4, more=2)
    assert "was restored" not in restored(4)


def test_a_stuck_step_is_never_skipped_for_nothing(shm: Path) -> None:
    cluster = Cluster(shm)
    train_and_die(cluster, 2, 1)
    for _ in range(3):
        assert_restored(cluster.train(2, last=0, options={"skip_stuck": 1}), 2, 1)


def test_one_process_needs_no_mpi(shm: Path) -> None:
    memory = {"MLFLASH_MEMORY": shm}
    program = """
import sys, numpy as np, mlflash
state = {"x": np.arange(5.0)}
with mlflash.Checkpointer("/some/where/run") as ckpt:
    step = ckpt.restore(state)
    print(step, state["x"].sum(), ckpt.survives)
    state["x"] += 1
    ckpt.save((step or 0) + 1, state).wait()
assert "mpi4py.MPI" not in sys.modules and "torch" not in sys.modules
"""
    for start, total in ((None, 10.0), (1, 15.0), (2, 20.0)):
        assert f"{start} {total} any process" in ran(sys.executable, "-W", "error", "-c", program, **memory).stdout


def test_a_job_without_a_name_reads_well(shm: Path) -> None:
    done = ran(sys.executable, "-c", "import mlflash; mlflash.Checkpointer()", code=None, MLFLASH_MEMORY=shm)
    assert "ConfigError: this job has no name" in done.stderr


def test_a_checkpointer_that_is_never_closed_does_not_hang_the_exit(shm: Path) -> None:
    program = """
import numpy as np, mlflash
ckpt = mlflash.Checkpointer('/a/b')
ckpt.save(1, {'x': np.zeros(9_000_000)})
print('ok')
"""
    assert ran(sys.executable, "-W", "error", "-c", program, MLFLASH_MEMORY=shm).stdout == "ok\n"


@pytest.mark.parametrize(("point", "transport"), [("transfer.arrived", "p2p"), ("protect.sealed", "rma")])
def test_an_error_of_mpi_in_the_courier_frees_no_slot_that_is_needed(shm: Path, point: str, transport: str) -> None:
    cluster = Cluster(shm, transport=transport)
    trap = {"path": ["commit.seen", "commit.seen", point], "action": "mpi fails", "rank": 1}
    job = cluster.begin(2, program="keep_saving", last=3, hangs=True, traps=[trap])
    job.wait_for("through", 2)
    job.kill()
    assert any(job.out.glob("sprung*"))
    committed = {(r["rank"], r["step"]) for r in job.records("committed")}
    assert committed >= {(0, 1), (0, 2), (1, 1), (1, 2)}
    newest = max(step for _, step in committed)
    for lost in (0, 1):
        cluster.wipe(lost)
        result = cluster.train(2, last=0)
        # Where both slots of step 3 were sealed before, it is whole; step 2 is there in any case.
        assert {r["step"] for r in result.of("restored")} in [{step} for step in range(newest, 4)], result.log
        assert [r["wrong"] for r in result.of("restored")] == [[], []]


def test_where_nothing_can_be_restored_it_ends_with_the_reasons(shm: Path, tmp_path: Path) -> None:
    with mlflash.Checkpointer(job="j", memory=str(shm), redundancy="none") as ckpt:
        ckpt.save(4, {"w": np.arange(1000)}).wait()
    slots = [*shm.glob("mlflash-*/j/slot-*")]
    for slot in slots:
        flip(slot, PAGE_NBYTES + 10)
    before = [slot.read_bytes() for slot in slots]
    program = "import mlflash; mlflash.Checkpointer(redundancy='none').restore({})"
    command = [sys.executable, "-m", "mlflash", "run", "-N", 1, "--job", "j", "--memory", shm, "--look-every", 0.5]
    command += ["--", sys.executable, "-c"]
    said = ran(*command, program, code=65, cwd=tmp_path).stderr
    assert "step 4: slot-000" in said.partition("finished with exit code 65: there are checkpoints")[2]
    assert said.count("mlflash run: start ") == 1 and "MLFLASH_FRESH=1, or delete it with `mlflash clean j`" in said
    assert [slot.read_bytes() for slot in slots] == before
    last = json.loads((tmp_path / "run.jsonl").read_text().splitlines()[-1])
    assert last["code"] == 65 and "step 4" in last["why"]
    ran(*command, program.replace("restore({})", "restore({}) is None or 1 / 0"), cwd=tmp_path, MLFLASH_FRESH=1)
