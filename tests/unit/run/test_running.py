"""Who sits where, when to start again, and what is read of Slurm: the pure parts of `mlflash run`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from processes import ran

from mlflash.launch.cause import Cause
from mlflash.run import first_node_guard
from mlflash.run.agents import Agents
from mlflash.run.launch_systems import OnSsh, is_lost
from mlflash.run.node_watch import Looks, Watch, ask
from mlflash.run.supervisor import Restarts, choose_nodes
from mlflash.tools.run_job import run

HOSTS = [f"n{number}" for number in range(8)]


@pytest.mark.parametrize(
    ("fit", "hosts"),
    [("de", "de"), ("ac", "ac"), ("c", None)],  # ranks have other numbers: training that reshards
)
def test_fewer_nodes_are_enough_where_that_was_said(fit: str, hosts: str | None) -> None:
    assert choose_nodes("abc", list(fit), 3, 2) == (None if hosts is None else tuple(hosts))


@given(st.lists(st.sampled_from(HOSTS), min_size=1, max_size=5, unique=True), st.sets(st.sampled_from(HOSTS)))
def test_nobody_sits_twice_and_nobody_moves_without_need(taken: list[str], fit: set[str]) -> None:
    after = choose_nodes(taken, sorted(fit), len(taken))
    assert (after is None) == (len(fit) < len(taken))
    if after is not None:
        assert len({*after}) == len(taken) and {*after} <= fit
        assert all(new == old for new, old in zip(after, taken, strict=True) if old in fit)


Failed = dict[str, Any]
LOST: Failed = {"newest": 5, "node_lost": True}


@pytest.mark.parametrize(
    ("failures", "end"),
    [
        ([{"newest": newest} for newest in (5, 9, 12, 12)], "failed 2 times after step 12"),
        ([{"newest": None}] * 2, "failed 2 times before the first checkpoint"),
        ([LOST] * 10, "9 of 9 restarts"),  # which is no fault of the training
        ([{"newest": newest, "certified": 8} for newest in (12, 12, 8, 12)], "failed 2 times after step 8"),
    ],
)
def test_it_is_started_again_as_long_as_that_has_a_chance(failures: list[Failed], end: str) -> None:
    restarts = Restarts(most=9)
    for failed in failures[:-1]:
        assert restarts.after_failure(**{"node_lost": False, **failed}) == ""
    assert end in restarts.after_failure(**{"node_lost": False, **failures[-1]})


ERROR = Cause("error", "ValueError: bad batch 17", "t.py:3", 1, "a")
OTHER, KILLED = Cause("error", "IndexError: 17"), Cause("killed", "its process was killed by signal 9")


@pytest.mark.parametrize(
    ("failures", "end", "is_same_error"),
    [
        ([(5, ERROR), (9, ERROR), (9, ERROR)], "the same error came again after step 9", True),
        ([(None, ERROR), (None, ERROR)], "the same error came again before the first checkpoint", True),
        ([(9, ERROR), (9, OTHER)], "it failed 2 times after step 9", False),
        ([(9, KILLED), (9, KILLED)], "it failed 2 times after step 9", False),
        ([(9, None), (9, None)], "it failed 2 times after step 9", False),
    ],
)
def test_the_same_error_after_the_same_step_is_told_from_other_failures(
    failures: list[tuple[int | None, Cause | None]], end: str, is_same_error: bool
) -> None:
    restarts = Restarts(most=2)
    for newest, cause in failures[:-1]:
        assert restarts.after_failure(newest, False, cause=cause) == "" and not restarts.is_same_error
    newest, cause = failures[-1]
    assert end in restarts.after_failure(newest, False, cause=cause) and restarts.is_same_error == is_same_error


def test_a_lost_node_between_them_does_not_hide_the_same_error() -> None:
    restarts = Restarts(most=9)
    assert restarts.after_failure(9, False, cause=ERROR) == ""
    assert restarts.after_failure(9, True, cause=Cause("node", "b is lost")) == ""
    assert "same error" in restarts.after_failure(9, False, cause=ERROR)


def test_the_same_error_goes_back_to_a_certified_step_first() -> None:
    restarts = Restarts(most=9)
    assert restarts.after_failure(9, False, certified=6, cause=ERROR, is_repeated=True) == "" and restarts.goes_back
    assert "same error came again after step 6" in restarts.after_failure(9, False, certified=6, cause=ERROR)


def test_pauses_grow_while_nothing_new_is_committed() -> None:
    restarts = Restarts(most=20)
    pauses = [restarts.after_failure(**LOST) or restarts.pause_s for _ in range(9)]
    assert pauses == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    assert restarts.after_failure(6, node_lost=False) == "" and restarts.pause_s == 0


def test_a_step_that_failed_twice_or_is_suspect_is_left_for_the_certified_one() -> None:
    restarts = Restarts(most=10)
    failures = [
        (LOST | {"newest": 12, "certified": 8, "is_suspect": True}, False),  # a lost node is no reason
        ({"newest": 12, "certified": 12, "is_suspect": True}, False),  # it is the newest
        ({"newest": 13, "is_suspect": True}, False),
        ({"newest": 14, "certified": 12, "is_suspect": True}, True),
        ({"newest": 15, "certified": 14}, False),
        ({"newest": 15, "certified": 14}, True),
    ]
    for failed, goes_back in failures:
        assert restarts.after_failure(**{"node_lost": False, **failed}) == "" and restarts.goes_back == goes_back


@pytest.mark.parametrize(
    ("states", "lost"),
    [("down down* allocated* idle* fail DOWN", True),
     ("allocated idle mixed mixed- allocated$ draining drained completing unknown", False)],
)  # fmt: skip
def test_a_node_that_is_out_of_service_is_lost_and_one_that_trains_goes_on(states: str, lost: bool) -> None:
    assert {is_lost(state) for state in states.split()} == {lost} and not is_lost("")


PULSE: dict[str, Any] = {
    "format": 1, "run": "r", "rank": 0, "ranks": 2, "node": "a", "pid": 7, "beat": 1.0, "times": {"restored": 1.0},
    "state": "started", "alive": True, "saved": 12, "committed": 11, "restored": 10, "source": "memory",
}  # fmt: skip


class Nodes:
    """A launcher whose nodes say what a test says."""

    def __init__(self) -> None:
        self.said: dict[str, Any] = {}
        self.during = lambda: None  # happens while nodes are looked at

    def ask(self, hosts: list[str], what: str, timeout_s: float, behind_s: float, **fields: Any) -> dict[str, Any]:
        said = {host: self.said[host] for host in hosts if host in self.said}
        self.during()
        return said


def say(*heartbeats: dict[str, Any]) -> dict[str, Any]:
    return {"free": 1, "memory_error": "", "gpus": 0, "gpu_error": "", "interface": None, "steps": [],
            "heartbeats": [*heartbeats]}  # fmt: skip


def test_a_look_runs_nothing_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("tokenize", "json", "mlflash"):
        (tmp_path / f"{name}.py").write_text(f"open('{tmp_path}/ran', 'w')\nraise SystemExit(3)\n")
    with Agents(OnSsh(["localhost"])) as agents:
        said, unread = ask(agents, ["localhost"], "status", memory=str(tmp_path), job="j", interface="")
    assert said["localhost"]["steps"] == [] and not unread and not (tmp_path / "ran").exists()


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
    watch = Watch(looks, "r", ("a", "b"), 2, 0)

    def look(**said: Any) -> str:
        nodes.said = said
        looks.look(["a", "b"])
        return watch.dead()

    zero, one = (PULSE | {"rank": rank} for rank in range(2))
    assert look(a=say(zero), b=say(one)) == ""
    assert look(a=say(zero), b=say(one | {"alive": False})) == "" and look(a=say(zero), b=say(one)) == ""
    assert look(a=say(zero), b=say()) == "" and look(a=say(zero), b=say()) == "ranks [1] died"
    assert look(a=say(zero)) == "" and look(a=say(zero)) == "b does not answer"
    assert look(a=say(zero), b=say(one | {"alive": False, "state": "ended"})) == ""


def test_a_job_without_a_name_is_asked_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "MLFLASH_JOB"):
        monkeypatch.delenv(name, raising=False)
    told = CliRunner().invoke(run, ["-N", "1", "--", "true"])
    assert told.exit_code == 2 and "give --directory" in told.output and "--job" in told.output


def test_a_node_without_the_directory_of_the_slots_is_named_with_what_to_do(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    words = ["run", "-N", "1", "--job", "j", "--journal", tmp_path / "run.jsonl", "--", "true"]
    told = ran(sys.executable, "-m", "mlflash", *words, code=1, MLFLASH_MEMORY=nowhere)
    why = (f"the directory of its slots, {nowhere}, cannot be used (No such file or directory): create it, or give "
           "another one by MLFLASH_MEMORY or --memory")  # fmt: skip
    assert told.stderr.splitlines() == [
        f"mlflash run: localhost is not fit to train: {why}",
        "mlflash run: finished with exit code 1: fewer than 1 nodes are fit to train, of localhost",
    ]
