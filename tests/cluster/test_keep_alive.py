"""`mlflash run --keep-alive` on nodes that crash: who is left trains on in the same processes, and ends with the same
bits."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster.nodes import Nodes
from kept_run import BUSY_S, MLFLASH, TRAINER, KeptRun, uninterrupted
from processes import is_agent
from waiting import until

pytest.importorskip("torch.distributed")
RANKS, LAST = 3, 40


@pytest.fixture
def start(nodes: Nodes) -> Iterator[Any]:
    runs: list[KeptRun] = []

    def begin(last: int = LAST, **training: Any) -> KeptRun:
        runs.append(KeptRun(nodes, RANKS, last, **training))
        return runs[-1]

    yield begin
    for run in runs:
        run.close()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return uninterrupted(tmp_path_factory.mktemp("uninterrupted"), (RANKS, LAST))


def lose(nodes: Nodes, host: str, how: str) -> None:
    if how in ("killed", "stopped"):
        (pid,) = nodes.running(host, str(TRAINER))
        os.kill(pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    else:
        nodes.crash(host, how == "power cut")


@pytest.mark.parametrize("how", ["killed", "stopped", pytest.param("crash", marks=pytest.mark.gate), "power cut"])
def test_the_others_stay_and_train_on_with_the_same_bits(
    start: Any, nodes: Nodes, expected: list[str], how: str
) -> None:
    run = start(hold_at=20)
    run.wait_for(18)
    before = [run.steps(rank)[-1][2] for rank in range(3)]
    lose(nodes, "host2", how)
    run.go_on()
    assert run.wait() == 0, run.log()
    ends = run.ends()
    assert [end["digest"] for end in ends] == expected
    assert [end["node"] for end in ends] == ["host1", "host4", "host3"]
    assert [str(ends[rank]["pid"]) for rank in (0, 2)] == [before[0], before[2]], "who was left stayed"
    assert [end["entries"] for end in ends] == [2, 1, 2]
    (recovered,) = run.events("recovered")
    assert recovered["lost"] == [1] and recovered["step"] >= 17 and len(run.events("start")) == 1
    print(how, recovered)


@pytest.mark.parametrize(
    ("rank", "point"),
    [(0, "left"), (2, "seated"), (0, "couriers"), (1, "open"), (0, "groups"), (1, "restored")],
)
def test_a_second_loss_in_a_recovery_is_one_more_of_the_same(
    start: Any, nodes: Nodes, expected: list[str], rank: int, point: str
) -> None:
    run = start(hold_at=20, die_in=[[rank, f"round.{point}"]])
    run.wait_for(18)
    lose(nodes, "host2", "killed")  # where a process waits again by the time that it is needed
    run.go_on()
    assert run.wait() == 0, run.log()
    print(run.log(), run.events("recovered"), run.events("late"))
    assert (run.out / f"died-{rank}-round.{point}").exists()
    assert len(run.events("start")) == 1, run.log()
    assert [end["digest"] for end in run.ends()] == expected
    assert not run.events("late"), "who waits for it is told, and waits no longer"


@pytest.mark.timeout(240)  # a minute alone on two cores, and three recoveries
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_fewer_ranks_train_on_and_more_when_the_node_is_back(
    start: Any, nodes: Nodes, tmp_path: Path, kind: str
) -> None:
    run = start(10_000, hosts=3, more=["--min-ranks", "2"], kind=kind, stops=True, hold_at=20, pause=0.02)
    run.wait_for(18)
    before = [run.steps(rank)[-1][2] for rank in range(3)]
    lose(nodes, "host2", "crash")
    run.go_on()
    until(lambda: run.events("recovered"), run.log)
    (fewer,) = run.events("recovered")
    assert fewer["lost"] == [1] and fewer["ranks"] == 2
    parts = [(3, fewer["step"])]
    if kind == "fsdp":  # after a relaunch on three ranks, DDP may add in another order
        nodes.boot("host2")
        until(lambda: run.events("moved"), run.log)
        (more,) = run.events("moved")
        assert more["lost"] == [] and more["ranks"] == 3
        parts.append((2, more["step"]))
    last = run.stop()
    assert run.wait() == 0, run.log()
    assert len(run.events("start")) == 1, run.log()
    ends = run.ends()[: 3 if kind == "fsdp" else 2]
    parts.append((len(ends), last))
    assert [end["digest"] for end in ends] == uninterrupted(tmp_path, *parts, kind=kind), parts
    assert [str(end["pid"]) for end in ends[:2]] == [before[0], before[2]], "who was left stayed"
    print(kind, run.log())


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_with_light_saves_a_lost_node_costs_no_step_that_was_committed(
    start: Any, nodes: Nodes, tmp_path: Path, kind: str
) -> None:
    run = start(hold_at=20, kind=kind, settings={"job": "kept", "light": 9})  # whole: 1, 11, 21
    run.wait_for(18)
    lose(nodes, "host2", "crash")
    run.go_on()
    assert run.wait() == 0, run.log()
    (recovered,) = run.events("recovered")
    assert recovered["lost"] == [1] and recovered["step"] >= 17 and len(run.events("start")) == 1, run.log()
    steps = [int(step[1]) for step in run.steps(0)]
    again = [after for before, after in itertools.pairwise(steps) if after != before + 1]
    assert again in ([], [recovered["step"] + 1])
    assert [end["digest"] for end in run.ends()] == uninterrupted(tmp_path, (RANKS, LAST), kind=kind)
    print(kind, recovered)


def warn(nodes: Nodes, host: str) -> None:
    """Send SIGPWR to the agent of a node."""
    (agent,) = filter(is_agent, nodes.running(host))
    os.kill(agent, signal.SIGPWR)


@pytest.mark.parametrize("how", ["mlflash move", "SIGPWR"])
def test_ranks_leave_a_node_after_a_save_and_no_step_is_lost(
    start: Any, nodes: Nodes, expected: list[str], how: str
) -> None:
    run = start(more=["--lost-after", str(BUSY_S)], hold_at=20, pause=0.02)
    run.wait_for(18)
    run.wait_for_spare("host4")
    if how == "SIGPWR":
        warn(nodes, "host2")
        until(lambda: "on host2: received SIGPWR: its ranks move" in run.log(), run.log)
    else:
        told = nodes.command("host2", [MLFLASH, "move", "--job", "kept"])
        said = subprocess.run(told, capture_output=True, text=True, timeout=60, check=True).stdout
        assert said.startswith("this node is")
    run.go_on()
    assert run.wait() == 0, run.log()
    ends = run.ends()
    assert [end["digest"] for end in ends] == expected
    assert [end["node"] for end in ends] == ["host1", "host4", "host3"]
    (moved,) = run.events("moved")
    assert moved["step"] >= 19 and not run.events("recovered") and len(run.events("start")) == 1, run.log()
    others = [step for step in range(1, LAST + 1) if step != moved["step"]]  # it is noted after its save, which ends it
    for rank in range(3):
        assert [int(step[1]) for step in run.steps(rank)] == others, "no step was made twice"
    print(moved)


def test_a_node_that_nobody_can_take_is_not_left(start: Any, nodes: Nodes) -> None:
    run = start(hosts=3, more=["--lost-after", str(BUSY_S)], hold_at=20)
    run.wait_for(18)
    told = nodes.command("host1", [MLFLASH, "move", "host2", "--job", "kept"])
    refused = subprocess.run(told, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 1 and "are too few for 3 ranks" in refused.stderr
    warn(nodes, "host3")
    why_not = "on host3: received SIGPWR: its ranks stay, because 2 processes on other hosts are too few for 3 ranks"
    until(lambda: why_not in run.log(), run.log)
    run.go_on()
    assert run.wait() == 0, run.log()
    assert [end["node"] for end in run.ends()] == ["host1", "host2", "host3"] and not run.events("moved")


def test_a_rank_that_hangs_is_named_and_replaced(start: Any, nodes: Nodes, expected: list[str]) -> None:
    run = start(more=["--hang-after", "3"], hang=[[1, 20]])
    assert run.wait() == 0, run.log()
    assert [end["digest"] for end in run.ends()] == expected
    print(run.log(), run.events("hang"), run.events("recovered"))
    (hang,), (recovered,) = run.events("hang"), run.events("recovered")
    assert hang["rank"] == 1 and "kept_trainer.py" in hang["why"] and "(die)" in hang["why"]
    assert recovered["lost"] == [1] and recovered["why"] == hang["why"] and len(run.events("start")) == 1
    print(hang, recovered)
