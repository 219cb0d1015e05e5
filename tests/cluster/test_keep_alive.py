"""`mlflash run --keep-alive` on nodes that crash: who is left trains on in the same processes, and ends with the same
bits."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from cluster.nodes import Nodes
from kept_run import TRAINER, KeptRun, uninterrupted

pytest.importorskip("torch.distributed")
RANKS, LAST = 3, 40


@pytest.fixture
def start(nodes: Nodes) -> Iterator[Any]:
    runs: list[KeptRun] = []

    def begin(**training: Any) -> KeptRun:
        runs.append(KeptRun(nodes, RANKS, LAST, **training))
        return runs[-1]

    yield begin
    for run in runs:
        run.close()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return uninterrupted(tmp_path_factory.mktemp("uninterrupted"), RANKS, LAST)


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
