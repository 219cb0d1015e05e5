"""`mlflash run --keep-alive` in an allocation of Slurm: who is left stays, whatever Slurm knows of the node by then."""

from __future__ import annotations

import pytest
from cluster.slurm.daemons import Slurm
from kept_run import KeptJob
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
