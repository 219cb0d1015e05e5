"""Who sits where, when to start again, and what is read of Slurm: the pure parts of `mlflash run`."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from mlflash.commands.run import run
from mlflash.launcher import first_node_guard
from mlflash.launcher.launch_system import NodeAssignment, assign_nodes, reassign_nodes
from mlflash.launcher.node_watch import Looks, Watch, ask, failure, recovery
from mlflash.launcher.on_hosts import OnHosts
from mlflash.launcher.on_slurm import OnSlurm, is_lost, own_id
from mlflash.launcher.supervisor import Restarts

HOSTS = [f"n{number}" for number in range(8)]


def test_the_first_nodes_that_are_fit_are_taken() -> None:
    assert assign_nodes(["c", "a", "b"], 2, 4) == NodeAssignment(("c", "a"), 4)
    assert assign_nodes(["a"], 2, 1) is None and assign_nodes(["a"], 2, 1, least=1) == NodeAssignment(("a",), 1)
    assert (
        list(NodeAssignment(("a", "b"), 2).hosts_of_ranks()) == ["a", "a", "b", "b"]
        and NodeAssignment(("a", "b"), 2).ranks == 4
    )


@pytest.mark.parametrize(
    ("fit", "least", "hosts"),
    [
        ("acde", 0, "adc"),  # a spare takes the place of b
        ("abcde", 0, "abc"),
        ("de", 0, None),
        ("de", 2, "de"),
        ("ac", 2, "ac"),  # ranks have other numbers: training that reshards
        ("c", 2, None),
    ],
)
def test_who_can_stay_stays_and_spares_take_the_other_seats(fit: str, least: int, hosts: str | None) -> None:
    before = NodeAssignment(tuple("abc"), 2)
    assert reassign_nodes(before, list(fit), 3, least) == (None if hosts is None else NodeAssignment(tuple(hosts), 2))


def test_a_run_that_got_smaller_grows_again() -> None:
    assert reassign_nodes(NodeAssignment(("a", "c"), 1), ["a", "b", "c"], 3, 2) == NodeAssignment(("a", "c", "b"), 1)


@given(st.lists(st.sampled_from(HOSTS), min_size=1, max_size=5, unique=True), st.sets(st.sampled_from(HOSTS)))
def test_nobody_sits_twice_and_nobody_moves_without_need(taken: list[str], fit: set[str]) -> None:
    before = NodeAssignment(tuple(taken), 1)
    after = reassign_nodes(before, sorted(fit), len(taken))
    assert (after is None) == (len(fit) < len(taken))
    if after is not None:
        assert len({*after.hosts}) == len(taken) and {*after.hosts} <= fit
        assert all(new == old for new, old in zip(after.hosts, before.hosts, strict=True) if old in fit)


def test_it_is_started_again_as_long_as_it_gets_on() -> None:
    restarts = Restarts(most=10)
    for newest in (5, 9, 12):
        assert restarts.after_failure(newest, node_lost=False) == ""
        assert restarts.pause_s == 0
    assert "failed 2 times after step 12" in restarts.after_failure(12, node_lost=False)


def test_a_lost_node_is_no_fault_of_the_training() -> None:
    restarts = Restarts(most=9)
    pauses = []
    for _ in range(9):
        assert restarts.after_failure(5, node_lost=True) == ""
        pauses.append(restarts.pause_s)
    assert pauses == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    assert "9 of 9 restarts" in restarts.after_failure(5, node_lost=True)


def test_a_training_that_never_gets_to_a_checkpoint_has_two_tries() -> None:
    restarts = Restarts(most=10)
    assert restarts.after_failure(None, node_lost=False) == ""
    assert "before the first checkpoint" in restarts.after_failure(None, node_lost=False)


def test_a_step_that_failed_twice_is_left_for_the_certified_one_and_once_only() -> None:
    restarts = Restarts(most=10)
    assert restarts.after_failure(12, node_lost=False, certified=8) == "" and not restarts.goes_back
    assert restarts.after_failure(12, node_lost=False, certified=8) == "" and restarts.goes_back
    assert restarts.after_failure(8, node_lost=False, certified=8) == "" and restarts.goes_back, "nothing was saved yet"
    assert "failed 2 times after step 8" in restarts.after_failure(12, node_lost=False, certified=8)


def test_after_it_went_back_it_goes_on_from_the_newest_again() -> None:
    restarts = Restarts(most=10)
    assert restarts.after_failure(12, node_lost=False, certified=8, is_suspect=True) == "" and restarts.goes_back
    assert restarts.after_failure(12, node_lost=True, certified=8) == "" and restarts.goes_back, "nothing was saved yet"
    assert restarts.after_failure(10, node_lost=False, certified=8) == "" and not restarts.goes_back
    assert restarts.after_failure(14, node_lost=False, certified=13, is_suspect=True) == "" and restarts.goes_back


def test_a_lost_node_is_no_reason_to_go_back_nor_is_a_step_that_is_the_newest() -> None:
    restarts = Restarts(most=10)
    for _ in range(3):
        assert restarts.after_failure(12, node_lost=True, certified=8, is_suspect=True) == "" and not restarts.goes_back
    assert restarts.after_failure(12, node_lost=False, certified=12, is_suspect=True) == "" and not restarts.goes_back
    assert restarts.after_failure(13, node_lost=False, is_suspect=True) == "" and not restarts.goes_back


@pytest.mark.parametrize("state", ["down", "down*", "allocated*", "idle*", "fail", "DOWN"])
def test_a_node_that_is_out_of_service_is_lost(state: str) -> None:
    assert is_lost(state)


@pytest.mark.parametrize(
    "state", ["allocated", "idle", "mixed", "mixed-", "allocated$", "draining", "drained", "completing", "unknown", ""]
)
def test_one_that_trains_goes_on_whatever_else_slurm_says(state: str) -> None:
    assert not is_lost(state)


def test_the_number_of_an_array_is_never_taken_for_that_of_a_job() -> None:
    assert own_id({"SLURM_JOB_ID": "71"}) == "71"
    assert own_id({"SLURM_JOB_ID": "71", "SLURM_ARRAY_JOB_ID": "71", "SLURM_ARRAY_TASK_ID": "3"}) == "71_3"


PULSE: dict[str, Any] = {
    "format": 1,
    "run": "r",
    "rank": 0,
    "ranks": 2,
    "node": "a",
    "pid": 7,
    "beat": 1.0,
    "times": {"restored": 1.0},
    "state": "started",
    "alive": True,
    "saved": 12,
    "committed": 11,
    "restored": 10,
    "source": "memory",
}


def test_an_outage_is_split_into_what_it_was_spent_on() -> None:
    before = failure([PULSE | {"beat": 100.0}, PULSE | {"beat": 99.0, "saved": 11}], 117.0)
    assert (before.last_beat, before.noticed, before.saved) == (100.0, 117.0, 12)
    times = [{"made": 120.0, "restored": 121.0, "saved": 121.5}, {"made": 120.5, "restored": 121.0, "saved": 121.25}]
    found = recovery([PULSE | {"beat": 122.0, "times": each} for each in times], before, 118.5)
    spans = {"detect_s": 17, "look_s": 1.5, "launch_s": 2, "restore_s": 0.5, "first_step_s": 0.5}
    assert found == {"restored": 10, "source": "memory", "steps_lost": 2, "outage_s": 21.5, **spans}


class Nodes:
    """A launcher whose nodes say what a test says."""

    def __init__(self) -> None:
        self.said: dict[str, str] = {}
        self.during = lambda: None  # happens while nodes are looked at

    def on_each(self, hosts: list[str], argv: list[str], timeout_s: float, behind_s: float) -> dict[str, str]:
        said = {host: self.said[host] for host in hosts if host in self.said}
        self.during()
        return said


def say(*heartbeats: dict[str, Any]) -> str:
    return json.dumps({"free": 1, "gpus": 0, "gpu_error": "", "interface": None, "steps": [], "heartbeats": heartbeats})


def test_what_a_later_look_has_found_is_not_undone_by_an_earlier_one_that_took_longer() -> None:
    nodes = Nodes()
    looks = Looks(nodes, "/dev/shm", "job", 0, "")  # type: ignore[arg-type]
    nodes.said = {"a": say(PULSE)}

    def meanwhile() -> None:
        nodes.during, nodes.said = lambda: None, {}
        looks.look(["a"])

    nodes.during = meanwhile
    looks.look(["a"])
    assert looks.silent(["a"]) == ["a"]


def test_looks_of_a_long_job_leave_room_for_its_own_steps() -> None:
    looks = Looks(Nodes(), "/dev/shm", "job", 0, "")  # type: ignore[arg-type]
    passed, count = 0.0, 0
    while passed < 25 * 86_400:
        passed += looks.every(15.0)
        count += 1
        looks._asked = count
    assert looks.every(15.0) == 120.0 and 30_000 < count < 40_000


def test_a_node_far_behind_most_others_is_not_waited_for(tmp_path: Path) -> None:
    shell = tmp_path / "shell"
    shell.write_text(
        '#!/bin/sh\nhost=$1; shift\n[ "$host" != slow ] || sleep 1000\n[ "$host" != bad ] || exit 1\neval "$@"\n'
    )
    shell.chmod(0o700)
    launcher = OnHosts(["a", "b", "slow", "bad"], str(shell))
    start = time.monotonic()
    told = launcher.on_each(launcher.hosts(), ["echo", "well"], 1000, behind_s=1)
    assert told == {"a": "well\n", "b": "well\n"} and time.monotonic() - start > 1


def test_a_look_runs_nothing_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("tokenize", "json", "mlflash"):
        (tmp_path / f"{name}.py").write_text(f"open('{tmp_path}/ran', 'w')\nraise SystemExit(3)\n")
    said, unread = ask(OnHosts(["localhost"]), ["localhost"], str(tmp_path), "j")
    assert said["localhost"]["steps"] == [] and not unread and not (tmp_path / "ran").exists()


def test_why_a_node_does_not_answer_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shell = tmp_path / "shell"
    shell.write_text("#!/bin/sh\necho 'Traceback:' >&2; echo 'DiskOnFire: no python' >&2; exit 1\n")
    shell.chmod(0o700)
    launcher = OnHosts(["far"], str(shell))
    for _ in range(2):
        assert launcher.on_each(["far"], ["true"], 60) == {}
    assert [record.getMessage() for record in caplog.records] == ["far does not answer: DiskOnFire: no python"]


def test_what_slurm_says_of_nodes_that_do_not_answer_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name, text in (("srun", "echo mlflash-told:a:{}; echo 'srun: error: b: StepId=7.$$ has a core' >&2"),
                       ("squeue", "true")):  # fmt: skip
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o700)
    launcher = OnSlurm("7")
    for _ in range(2):
        assert launcher.on_each(["a", "b"], ["true"], 60) == {"a": "{}\n"}
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith("not all nodes have answered: srun: error: b: StepId=7.")


def test_a_node_that_slurm_does_not_show_is_not_known_to_be_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    sinfo = tmp_path / "sinfo"
    for text, lost in (("true", False), ("echo a unknown", False), ("exit 1", False), ("echo a down", True)):
        sinfo.write_text(f"#!/bin/sh\n{text}\n")
        sinfo.chmod(0o700)
        assert first_node_guard._is_lost("a") is lost


def test_ranks_are_dead_when_two_looks_in_a_row_say_so() -> None:
    nodes = Nodes()
    looks = Looks(nodes, "/dev/shm", "job", 0, "")  # type: ignore[arg-type]
    watch = Watch(looks, "r", NodeAssignment(("a", "b"), 1), 0)

    def look(**said: str) -> str:
        nodes.said = said
        looks.look(["a", "b"])
        return watch.dead()

    zero, one = (PULSE | {"rank": rank} for rank in range(2))
    assert look(a=say(zero), b=say(one)) == ""
    assert look(a=say(zero), b=say(one | {"alive": False})) == "" and look(a=say(zero), b=say(one)) == ""
    assert look(a=say(zero), b=say()) == "" and look(a=say(zero), b=say()) == "ranks [1] died"
    assert look(a=say(zero)) == "" and look(a=say(zero)) == "b does not answer"
    assert look(a=say(zero), b=say(one | {"alive": False, "state": "ended"})) == ""


def test_a_mistyped_option_is_no_command() -> None:
    told = CliRunner().invoke(run, ["-N", "2", "--spare", "1", "--", "true"])
    assert told.exit_code == 2 and "--spare" in told.output


def test_a_job_without_a_name_is_asked_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "MLFLASH_JOB"):
        monkeypatch.delenv(name, raising=False)
    told = CliRunner().invoke(run, ["-N", "1", "--", "true"])
    assert told.exit_code == 2 and "give --directory" in told.output and "--job" in told.output
