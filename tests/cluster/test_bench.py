"""`mlflash bench` between nodes that are apart."""

from __future__ import annotations

import json
import os

import pytest
from bench_reports import MLFLASH, check
from cluster.jobs import NETMODS, mpiexec_on
from cluster.nodes import Nodes
from processes import ran


@pytest.mark.timeout(400)
def test_a_report_has_figures_between_two_nodes_and_names_neither(nodes: Nodes) -> None:
    out = nodes.path / "report.json"
    variables = [f"{name}={value}" for name, value in {**NETMODS["ofi"], "OMP_NUM_THREADS": "1"}.items()]
    unset = [word for name in os.environ if name.startswith("MLFLASH_") for word in ("--unset", name)]
    command = ["env", *unset, *variables, MLFLASH, "bench", "--size=1MiB", f"--out={out}"]
    ran(*mpiexec_on(nodes, ["host1", "host2"], 1, command), env=os.environ, timeout=360)
    report = json.loads(out.read_text())
    check(report)
    assert (report["fabric"]["between"], report["settings"]["emulated"]) == ("network", False)
    assert report["fabric"]["variables"]["FI_PROVIDER"] == "tcp"
    assert not any(word in out.read_text() for word in ("host1", "host2", str(nodes.path)))
    for host in nodes.names:
        assert "bench" not in nodes.run(host, "ls", "/dev/shm")
