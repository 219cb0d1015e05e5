"""Cables that are cut, plugged in again, or slow: waits that end, and saves that do not wait for the network."""

from __future__ import annotations

import pytest
from cluster.jobs import Cluster, Job
from cluster.nodes import Nodes
from harness import Result
from waiting import until

THREE = ("host1", "host2", "host3")
NBYTES, MBIT = 12_000_000, 160  # 0.6 s for a save
TIMEOUT_S = 4.0
MIDDLE = ["commit.seen", "commit.seen", "transfer.sent"]  # of the save of step 3


def start_saving(nodes: Nodes, transport: str, last: int, when_late: str, timeout_s: float = TIMEOUT_S,
                 **more: object) -> tuple[Cluster, Job]:  # fmt: skip
    """Start a job on slow cables."""
    for host in nodes.names:
        nodes.limit_rate(host, MBIT)
    cluster = Cluster(nodes, transport)
    job = cluster.start(THREE, "save_and_wait", last=last, nbytes=NBYTES, timeout_s=timeout_s, when_late=when_late,
                        **more)  # fmt: skip
    return cluster, job


def start_and_hold_in_save(nodes: Nodes, transport: str, victim: int, last: int, when_late: str) -> tuple[Cluster, Job]:
    """Start a job in which a rank waits in the middle of the save of step 3: its first chunk is on its way.

    However late its cable is cut, that save is not committed, and whoever waits misses this rank.
    """
    trap = {"path": MIDDLE, "action": "hold", "rank": victim}
    cluster, job = start_saving(nodes, transport, last, when_late, traps=[trap])
    until((job.out / f"sprung{victim}").exists, "a rank to be in the middle of a save")
    return cluster, job


def go_on(job: Job) -> None:
    (job.out / "go on").touch()


def check_restored(cluster: Cluster, hosts: tuple[str, ...], steps: list[int]) -> None:
    result = cluster.run(hosts, "save_and_wait", last=0, nbytes=NBYTES, timeout_s=60, when_late="leave")
    restored = result.of("restored")
    assert [r["step"] for r in restored] in [[step] * len(hosts) for step in steps], result.log
    assert [r["wrong"] for r in restored] == [[]] * len(hosts)
    assert [r["report"]["node"] for r in restored] == [*hosts]


def assert_named(result: Result, rank: int, lost: str) -> None:
    """The others were told who is missing."""
    late = [r for r in result.of("late") if r["rank"] != rank]
    assert [r["rank"] for r in late] == [r for r in range(len(THREE)) if r != rank], result.log
    for record in late:
        assert (record["ranks"], record["nodes"]) == ([rank], [lost]), record["text"]
        assert f"waited {TIMEOUT_S:g} s for rank {rank} on {lost}" in record["text"]


@pytest.mark.parametrize(("transport", "power_cut"), [("p2p", False), ("rma", True)])
def test_a_spare_replaces_a_silent_node_that_is_named(nodes: Nodes, transport: str, power_cut: bool) -> None:
    cluster, job = start_and_hold_in_save(nodes, transport, victim=2, last=9, when_late="leave")
    if power_cut:
        nodes.crash("host3", power_cut=True)
    else:
        nodes.cut("host3")
    go_on(job)
    living = THREE[:2] if power_cut else THREE
    job.wait_for("late", len(living))
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


@pytest.mark.parametrize("transport", [pytest.param("p2p", marks=pytest.mark.gate), "rma"])
def test_a_cable_cut_for_seconds_makes_saves_late_and_loses_nothing(nodes: Nodes, transport: str) -> None:
    cluster, job = start_and_hold_in_save(nodes, transport, victim=1, last=5, when_late="stay")
    nodes.cut("host2")
    go_on(job)
    job.wait_for("late", len(THREE))
    nodes.plug("host2")  # TCP tries again at its next turn, up to as long after as the cut lasted
    result = job.wait()
    assert_named(result, 1, "host2")
    assert [r["steps"] for r in result.of("end")] == [[4, 5]] * len(THREE), result.log
    assert len(result.of("committed")) == 5 * len(THREE), "the late step was not committed after all"
    nodes.crash("host1")
    nodes.boot("host1")
    check_restored(cluster, THREE, [5])


def test_save_does_not_wait_for_a_slow_network(nodes: Nodes) -> None:
    # The first save makes the slots, with both ends of every copy. No other one is held up where nothing gets through.
    cluster, job = start_saving(nodes, "rma", last=4, when_late="leave", timeout_s=3600, hold_at=3)
    job.wait_for("holds", len(THREE))
    for host in THREE:
        nodes.cut(host)
    go_on(job)
    job.wait_for("saved", 3 * len(THREE))
    for host in THREE:
        nodes.plug(host)
    result = job.wait()
    least_s = 0.8 * 8 * NBYTES / (MBIT * 1e6)
    for record in result.of("committed"):
        assert record["commit_s"] > least_s, "it was committed before the bytes can have been there"
    assert len(result.of("committed")) == 4 * len(THREE), result.log
    nodes.crash("host2")
    nodes.boot("host2")
    check_restored(cluster, THREE, [4])
