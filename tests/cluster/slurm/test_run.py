"""Jobs from the shipped template lose nodes of a real Slurm, go on with spares, and end with the same bits."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from cluster.slurm.daemons import Slurm
from cluster.slurm.jobs import MLFLASH, MPI_ENVIRONMENT, Job, written
from run_results import WORKER, Results, uninterrupted

LAST = 150


def submit(slurm: Slurm, template: str, out: str, options: str = "", nodes: int = 3, directory: str = "",
           sbatch: Sequence[str] = (), **training: object) -> Job:  # fmt: skip
    """Submit a training on two nodes; any more are spares. ``out``, and ``directory``, are where it writes."""
    text = written(
        slurm, template, f'--journal "{out}/run.jsonl" {options}', "--nodes", 2, "--spares", nodes - 2, "--directory",
        directory or f"{out}-pfs", "--script", WORKER, "--", "$directory", out, LAST,
        json.dumps({"pause": 0.05, **training}),
    )  # fmt: skip
    env = {**MPI_ENVIRONMENT, "PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.environ["PYTHONPATH"]}
    text = text.replace("export PATH=", f"export {shlex.join(f'{name}={value}' for name, value in env.items())} PATH=")
    return slurm.sbatch(text, *sbatch, *(["--array=0-1"] if template == "array" else []))


class Training(Results):
    """A job that trains, by default submitted from the template "train", and what it writes."""

    def __init__(self, slurm: Slurm, options: str = "", name: str = "out", job: Job | None = None,
                 directory: Path | None = None, **more: Any):  # fmt: skip
        super().__init__(slurm.path / name)
        self.slurm, self.directory = slurm, directory or slurm.path / f"{name}-pfs"
        self.job = job or submit(slurm, "train", str(self.out), options, **more)

    def go_on(self) -> None:
        """Let a training with ``hold_at`` begin that step."""
        (self.out / "go on").touch()

    def log(self) -> str:
        return f"{self.job.output()}\n{self.slurm.logs()}"


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Digests of the state of two ranks that nothing happened to."""
    return uninterrupted(tmp_path_factory.mktemp("uninterrupted"), 2, LAST)


@pytest.mark.gate
def test_a_node_that_crashes_is_replaced_by_a_spare(slurm: Slurm, expected: list[str]) -> None:
    training = Training(slurm, hold_at=25, sbatch=["--export=NONE"])  # its steps get its environment nevertheless
    training.wait_for_step(20)
    options = ["--directory", str(training.directory), "--slurm-job", training.job.id]
    told = json.loads(slurm.run(str(MLFLASH), "top", "--json", *options, timeout=60).stdout)
    assert [(rank["rank"], rank["node"], rank["alive"]) for rank in told["ranks"]] == [
        (0, "host1", True), (1, "host2", True),
    ]  # fmt: skip
    assert told["silent"] == [] and set(told["free"]) == {"host1", "host2", "host3"}, "the spare is a node, too"
    slurm.nodes.crash("host2")
    training.go_on()
    training.job.wait("COMPLETED")
    assert [end["digest"] for end in training.ends()] == expected, training.job.output()
    assert [end["node"] for end in training.ends()] == ["host1", "host3"]
    assert [event["hosts"] for event in training.events("start")] == [["host1", "host2"], ["host1", "host3"]]
    assert all(end["start"] >= 19 for end in training.ends())
    assert training.events("end")[1]["source"] == "memory" and training.events("finish")[0]["scavenged"] is True


@pytest.mark.parametrize("how", ["cable", "slurmd"])
def test_a_node_that_falls_silent_is_replaced(slurm: Slurm, expected: list[str], how: str) -> None:
    training = Training(slurm, hold_at=25)
    training.wait_for_step(20)
    if how == "cable":
        slurm.nodes.cut("host2")
    else:
        slurm.kill_slurmd("host2")
    training.go_on()
    training.job.wait("COMPLETED")
    assert [end["digest"] for end in training.ends()] == expected, training.job.output()
    if how == "cable":
        assert [end["node"] for end in training.ends()] == ["host1", "host3"]


def test_before_the_time_limit_it_is_scavenged_and_the_next_job_goes_on(slurm: Slurm, expected: list[str]) -> None:
    training = Training(slurm, pause=1.0)
    training.wait_for_step(5)
    training.job.signal("USR1", "--batch")  # what --signal=B:USR1@60 does a minute before the end
    training.job.wait("FAILED")
    assert training.job.details()["ExitCode"] == f"{128 + 10}:0" and not training.ends()
    (finish,) = training.events("finish")
    assert finish["scavenged"] is True and list(training.directory.glob("step-*/checkpoint.mlflash"))
    assert not any(slurm.nodes.run(host, "find", "/dev/shm", "-name", "slot-*") for host in slurm.nodes.names)
    again = Training(slurm)
    again.job.wait("COMPLETED")
    assert [end["digest"] for end in again.ends()] == expected and all(end["start"] >= 5 for end in again.ends())


def test_two_of_an_array_do_not_touch_each_other_and_each_requeues_itself(slurm: Slurm, expected: list[str]) -> None:
    whole = submit(slurm, "array", f"{slurm.path}/$SLURM_ARRAY_TASK_ID", nodes=2, directory=f"{slurm.path}/pfs")
    trainings = [Training(slurm, name=task, job=Job(slurm, f"{whole.id}_{task}"), directory=slurm.path / "pfs" / task)
            for task in ("0", "1")]  # fmt: skip
    trainings[1].wait_for_step(20)
    trainings[1].job.signal("USR1", "--batch")  # as before the time limit
    for training in trainings:
        training.job.wait("COMPLETED")
        assert [end["digest"] for end in training.ends()] == expected, training.job.output()
    assert [training.job.details()["Restarts"] for training in trainings] == ["0", "1"]
    assert [event["code"] for event in trainings[1].events("finish")] == [138, 0]
    assert trainings[1].ends()[0]["start"] >= 20
    assert trainings[1].events("end")[1]["source"].startswith(str(trainings[1].directory))


def test_a_hang_shows_its_stacks_and_goes_on(slurm: Slurm, expected: list[str]) -> None:
    hangs = Training(slurm, "--hang-timeout 20", name="hangs", nodes=2, hang_at=20)
    fails = Training(slurm, "--max-restarts 0", name="fails", nodes=2, fail_at=20)
    fails.job.wait("FAILED")
    assert "0 of 0 restarts are used up" in fails.job.output() and not fails.ends()
    assert fails.job.details()["ExitCode"] != "0:0" and fails.events("finish")[0]["scavenged"] is True
    hangs.job.wait("COMPLETED")
    assert "no rank has saved for 20 s" in hangs.job.output() and "run_worker.py" in hangs.job.output()
    assert [end["digest"] for end in hangs.ends()] == expected


def test_a_requeued_job_goes_on_from_the_memory_of_its_nodes(slurm: Slurm, expected: list[str]) -> None:
    training = Training(slurm, "--keep-memory")
    training.wait_for_step(20)
    slurm.run("scontrol", "requeuehold", training.job.id)  # it must not begin before it was told where
    slurm.wait("the job to wait", lambda: training.job.state() == "PENDING")
    slurm.run("scontrol", "update", f"jobid={training.job.id}", "nodelist=host1,host2,host3")
    slurm.run("scontrol", "release", training.job.id)
    training.job.wait("COMPLETED")
    assert training.job.details()["Restarts"] == "1"
    assert [end["digest"] for end in training.ends()] == expected and all(end["start"] >= 19 for end in training.ends())
    assert training.events("end")[-1]["source"] == "memory"


@pytest.mark.timeout(240)
def test_a_job_that_loses_its_first_node_is_scavenged_and_requeued(slurm: Slurm, expected: list[str]) -> None:
    training = Training(slurm, hold_at=25)
    training.wait_for_step(20)
    slurm.nodes.crash("host1")
    training.go_on()
    slurm.wait("the job to be requeued", lambda: training.job.details()["Restarts"] == "1")
    training.job.wait("COMPLETED")
    assert [end["digest"] for end in training.ends()] == expected and all(end["start"] >= 19 for end in training.ends())
    (guard,) = training.events("guard")
    assert guard["scavenged"] is True and guard["requeued"] is True and guard["why"].startswith("node host1 died")
    assert "host1" not in training.job.hosts()
