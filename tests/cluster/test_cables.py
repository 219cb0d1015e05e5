"""Cables that are cut, plugged in again, or slow: waits that end, and saves that do not wait for the network."""

from __future__ import annotations

import time

import pytest
from cluster.jobs import Cluster, Job
from cluster.nodes import Nodes
from harness import Result

THREE = ("host1", "host2", "host3")
NBYTES, MBIT = 12_000_000, 160  # 0.6 s for a save: time enough to cut a cable in the middle
TIMEOUT_S = 4.0
PING_S = 2.0  # mlflash then asks who is alive for so long


def start_saving(nodes: Nodes, transport: str, last: int, when_late: str) -> tuple[Cluster, Job]:
    """Start a job on slow cables."""
    for host in nodes.names:
        nodes.limit_rate(host, MBIT)
    cluster = Cluster(nodes, transport)
    job = cluster.start(THREE, "save_and_wait", last=last, nbytes=NBYTES, timeout_s=TIMEOUT_S, when_late=when_late)
    return cluster, job


def wait_for_middle_of_save(job: Job, step: int) -> None:
    """Wait until all ranks have staged a step and it is on its way to the partners."""
    job.wait_for("saved", step * len(THREE))
    time.sleep(0.2)


def check_restored(cluster: Cluster, hosts: tuple[str, ...], steps: list[int]) -> None:
    result = cluster.run(hosts, "save_and_wait", last=0, nbytes=NBYTES, timeout_s=60, when_late="leave")
    restored = result.of("restored")
    assert [r["step"] for r in restored] in [[step] * len(hosts) for step in steps], result.log
    assert [r["wrong"] for r in restored] == [[]] * len(hosts)
    assert [r["report"]["node"] for r in restored] == [*hosts]


def assert_named(result: Result, rank: int, lost: str) -> None:
    """The others were told who is missing, and not later than promised."""
    late = [r for r in result.of("late") if r["rank"] != rank]
    assert [r["rank"] for r in late] == [r for r in range(len(THREE)) if r != rank], result.log
    for record in late:
        assert (record["ranks"], record["nodes"]) == ([rank], [lost]), record["text"]
        assert f"waited {TIMEOUT_S:g} s for rank {rank} on {lost}" in record["text"]
        assert record["seconds"] < TIMEOUT_S + PING_S + 4


@pytest.mark.parametrize(("transport", "power_cut"), [("p2p", False), ("rma", True)])
def test_a_node_that_falls_silent_is_named_and_the_job_goes_on_with_a_spare(
    nodes: Nodes, transport: str, power_cut: bool
) -> None:
    cluster, job = start_saving(nodes, transport, last=9, when_late="leave")
    wait_for_middle_of_save(job, 3)
    if power_cut:
        nodes.crash("host3", power_cut=True)
    else:
        nodes.cut("host3")
    living = THREE[:2] if power_cut else THREE
    job.wait_for("late", len(living), timeout=40)
    (job.out / "leave").touch()
    job.wait_for_no_rank(living)
    # Neither MPI's mpiexec notices that a node is gone without a word: somebody (Slurm, say) has to kill it.
    job.kill()
    result = job.result()
    assert_named(result, 2, "host3")
    if not power_cut:
        nodes.crash("host3", power_cut=True)
    late = result.of("late")[0]["step"]
    check_restored(cluster, ("host1", "host2", "host4"), [late - 1, late])


@pytest.mark.parametrize("transport", ["p2p", "rma"])
def test_a_cable_cut_for_seconds_makes_saves_late_and_loses_nothing(nodes: Nodes, transport: str) -> None:
    cluster, job = start_saving(nodes, transport, last=5, when_late="stay")
    wait_for_middle_of_save(job, 3)
    nodes.cut("host2")
    job.wait_for("late", len(THREE), timeout=40)
    nodes.plug("host2")  # TCP tries again at its next turn, up to as long after as the cut lasted
    result = job.wait()
    assert_named(result, 1, "host2")
    assert [r["steps"] for r in result.of("end")] == [[4, 5]] * len(THREE), result.log
    assert len(result.of("committed")) == 5 * len(THREE), "the late step was not committed after all"
    nodes.crash("host1")
    nodes.boot("host1")
    check_restored(cluster, THREE, [5])


@pytest.mark.parametrize("transport", ["p2p", "rma"])
def test_save_does_not_wait_for_a_slow_network(nodes: Nodes, transport: str) -> None:
    cluster, job = start_saving(nodes, transport, last=4, when_late="leave")
    result = job.wait()
    least_s = 0.8 * 8 * NBYTES / (MBIT * 1e6)
    for record in result.of("committed"):
        assert record["commit_s"] > least_s, "it was committed before the bytes can have been there"
    # The first save makes the slots, with both ends of every copy.
    stalls = [r["stall_s"] for r in result.of("saved") if r["step"] > 1]
    assert len(stalls) == 3 * len(THREE) and max(stalls) < 0.5 * least_s, result.log
    nodes.crash("host2")
    nodes.boot("host2")
    check_restored(cluster, THREE, [4])


@pytest.mark.parametrize("transport", ["p2p", "rma"])
def test_cables_that_delay_and_lose_packets_cost_time_only(nodes: Nodes, transport: str) -> None:
    try:
        for host in nodes.names:
            nodes.disturb(host, delay_ms=10, loss_percent=0.5)
    except LookupError as error:
        pytest.skip(f"needs netem: {error}")
    cluster = Cluster(nodes, transport)
    result = cluster.run(THREE, last=3)
    assert len(result.of("end")) == len(THREE), result.log
    nodes.crash("host2")
    nodes.boot("host2")
    restored = cluster.run(THREE, last=3).of("restored")
    assert [(r["step"], r["wrong"]) for r in restored] == [(3, [])] * len(THREE)
