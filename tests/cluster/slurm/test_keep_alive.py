"""`mlflash run --keep-alive` in an allocation of Slurm: who is left stays, whatever Slurm knows of the node by then."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster.slurm.daemons import Slurm
from kept_run import BUSY_S, KeptJob, uninterrupted
from waiting import take, until

from mlflash.run.supervisor import GONE_S

pytest.importorskip("torch.distributed")


@pytest.mark.parametrize("power_cut", [False, True], ids=["crash", "power cut"])
def test_a_lost_node_ends_its_own_step_only(slurm: Slurm, power_cut: bool) -> None:
    """And Slurm, which hears of a crash when all train on, does not have them started again."""
    hold_again = [] if power_cut else [30]
    training = KeptJob(slurm, 2, 40, hold_at=20, holds=hold_again)
    training.wait_for(18)
    before = training.last_step(0)[2]
    slurm.nodes.crash("host2", power_cut)
    training.go_on()
    for step in hold_again:
        training.wait_for(step - 1)
        until(lambda: "DOWN" in slurm.run("sinfo", "-hNo", "%T", "-nhost2").stdout.upper(), "Slurm to miss host2", 60)
        take(3 * GONE_S)  # as often as nodes are asked after
        training.go_on(step)
    assert training.wait() == 0, training.log()
    training.job.wait("COMPLETED")
    ends = training.ends()
    assert [end["node"] for end in ends] == ["host1", "host3"], training.log()
    assert str(ends[0]["pid"]) == before and [end["entries"] for end in ends] == [2, 1], training.log()
    (recovered,) = training.events("recovered")
    assert recovered["lost"] == [1] and recovered["step"] >= 17 and len(training.events("start")) == 1
    print(recovered)


def test_ranks_leave_a_node_that_is_drained_and_no_step_is_lost(slurm: Slurm, tmp_path: Path) -> None:
    training = KeptJob(slurm, 2, 40, BUSY_S, hold_at=20, pause=0.02)
    training.wait_for(18)
    training.wait_for_spare("host3")
    before = training.last_step(0)[2]
    slurm.run("scontrol", "update", "nodename=host2", "state=drain", "reason=test")
    said = "host2 is draining: its ranks move after the next save"
    until(lambda: said in training.job.output(), training.log)
    training.go_on()
    assert training.wait() == 0, training.log()
    training.job.wait("COMPLETED")
    ends = training.ends()
    assert [end["digest"] for end in ends] == uninterrupted(tmp_path, (2, 40))
    assert [end["node"] for end in ends] == ["host1", "host3"], training.log()
    assert str(ends[0]["pid"]) == before and [end["entries"] for end in ends] == [2, 1], training.log()
    (moved,) = training.events("moved")
    assert moved["lost"] == [] and moved["why"] == "host2 is to be left" and moved["step"] >= 19
    assert not training.events("recovered") and len(training.events("start")) == 1, training.log()
    others = [step for step in range(1, 41) if step != moved["step"]]  # it is noted after its save, which ends it
    for rank in range(2):
        assert [int(step[1]) for step in training.steps(rank)] == others, "no step was made twice"
    assert training.job.output().count("host2 is draining") == 1
    print(moved)
