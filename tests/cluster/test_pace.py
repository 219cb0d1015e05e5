"""Training and courier on one slow cable: the courier gives way, and its saves are committed all the same."""

from __future__ import annotations

from cluster.jobs import Cluster
from cluster.nodes import Nodes

HOSTS = ("host1", "host2")
MBIT = 100
NBYTES = 2_000_000


def test_where_steps_are_slowed_the_courier_sends_less_and_saves_are_committed(nodes: Nodes) -> None:
    for host in HOSTS:
        nodes.limit_rate(host, MBIT)
    training = {"saves": 5, "every": 100, "nbytes": NBYTES, "gradient_nbytes": 65_536}
    result = Cluster(nodes).run(HOSTS, "train_beside", max_slowdown=0.05, **training)
    assert [(r["restored"], r["wrong"]) for r in result.of("end")] == [(5, []), (5, [])], result.log
    for rank in range(len(HOSTS)):
        committed = [r for r in result.of("committed") if r["rank"] == rank]
        assert [r["step"] for r in committed] == [1, 2, 3, 4, 5]
        assert committed[0]["slowdown"] > 0.05, "nothing was slowed, so that nothing is shown"
        assert committed[-1]["rate"] is not None and committed[-1]["rate"] < 0.5 * MBIT * 1e6 / 8, committed
        assert committed[-1]["commit_s"] > 2 * 8 * NBYTES / (MBIT * 1e6), "in half the time the cable carries it"
