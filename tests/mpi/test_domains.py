"""Failure domains: given, found, told."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mlflash import Checkpointer

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size

pytestmark = [
    pytest.mark.mpi(min_size=4), pytest.mark.skipif(SIZE != 4, reason="runs on 4 ranks"),
    pytest.mark.parametrize("options", ["p2p"], indirect=True),
]  # fmt: skip


def test_copies_go_to_another_rack_and_survives_says_what_that_is_worth(
    options: dict[str, Any], root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if RANK == 0:
        (root / "racks").write_text("levels: rack\nnode[0,2] A\nnode[1,3] B\n")
    COMM.Barrier()
    with Checkpointer(**options, domains=root / "racks") as ckpt:
        assert ckpt.report()["partners"] == {0: [1], 2: [3], 1: [0], 3: [2]}[RANK]
        assert ckpt.survives == (
            "any process; any 1 of 4 nodes; 4 of 6 pairs of nodes; any 1 rack; not: racks A and B together"
        )
        ckpt.save(1, {"x": np.arange(9)}).wait()
    with Checkpointer(**options, redundancy="xor:4", domains={"node[0-1]": "A", "node[2-3]": "B"}) as ckpt:
        assert ckpt.load()[0] == 1
        assert ckpt.survives.endswith("any 1 of 4 nodes; not: domain A, domain B")
    assert ("domain A holds 2 nodes of a group that may lose 1" in caplog.text) == (RANK == 0)


def test_hosts_that_the_file_does_not_name_are_named_in_a_warning(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, root: Path
) -> None:
    if RANK == 0:
        (root / "racks").write_text("node[0-1] A\n")
    COMM.Barrier()
    monkeypatch.setenv("MLFLASH_DOMAINS", str(root / "racks"))
    with caplog.at_level(logging.WARNING, "mlflash"), Checkpointer(**options):
        assert ("the failure domains of node2, node3 are not given" in caplog.text) == (RANK == 0)


@pytest.mark.in_thread  # the environment of a courier that is a process is what its trainer had at the beginning
def test_what_slurm_says_of_each_node_is_found(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_TOPOLOGY_ADDR", f"core.leaf{RANK // 2}.node{RANK}")
    monkeypatch.setenv("SLURM_TOPOLOGY_ADDR_PATTERN", "switch.switch.node")
    with Checkpointer(**options) as ckpt:
        assert ckpt.report()["partners"] == [(RANK + 2) % 4]
        assert ckpt.survives.endswith("any 1 leaf switch; not: leaf switches leaf0 and leaf1 together")
