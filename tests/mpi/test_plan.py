"""What a plan and failure domains say is what a Checkpointer makes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from emulated import on_node
from mpi4py import MPI
from on_node import disk_of
from ranks import SharedCouriers

from mlflash import Checkpointer
from mlflash.config import slots_of
from mlflash.placement.redundancy import parse, place
from mlflash.placement.survival import describe, of
from mlflash.tools.plan import Job, disk_nbytes, node_nbytes

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size

pytestmark = pytest.mark.mpi
on_4 = pytest.mark.skipif(SIZE != 4, reason="runs on 4 ranks")


@pytest.mark.parametrize("certify_after", [0, 1, 2])
@pytest.mark.parametrize("scheme", ["none", "copy", "copy:2", "xor:3", "xor:8", "rs:2+2"])
def test_the_bytes_of_a_plan_are_those_that_the_files_take(
    options: dict[str, Any], scheme: str, certify_after: int
) -> None:
    held = slots_of(certify_after)
    with Checkpointer(redundancy=scheme, certify_after=certify_after, **options) as ckpt:
        ckpt.prepare({"w": np.zeros(1_000_000, np.uint8)})
        taken = COMM.allgather(sum(slot["nbytes"] for slot in ckpt.report()["slots"]))
        job = Job(tuple(f"n{rank}" for rank in range(SIZE)), 1, 1_000_000,
                  own_slots=held, copy_slots=held)  # fmt: skip
        placed = place(job.topology, parse(scheme))
        assert max(taken) == node_nbytes(job, placed)
        assert ckpt.survives == describe(of(job.topology, placed))


@pytest.mark.parametrize("history", [0, 1])
@pytest.mark.parametrize("scheme", ["copy", "xor:3"])
def test_so_are_those_of_memory_and_disk_where_copies_are_on_disks(
    options: dict[str, Any], root: Path, scheme: str, history: int
) -> None:
    if SIZE < 3:
        pytest.skip("runs on 3 ranks and more")
    disk = Path(disk_of(RANK, root))
    with Checkpointer(redundancy=scheme, copies=str(disk), history=history, **options) as ckpt:
        for step in range(1, 3 + history):
            ckpt.save(step, {"w": np.zeros(1_000_000, np.uint8)}).wait()
        slots = COMM.allgather(ckpt.report()["slots"])
    held = [[slot["nbytes"] for slot in of_rank if slot["what"] == "own"] for of_rank in slots]
    on_disk = COMM.allgather(sum(path.stat().st_size for path in disk.rglob("slot-*")))
    job = Job(tuple(f"n{rank}" for rank in range(SIZE)), 1, 1_000_000, on_disk=True,
              copy_slots=2 + history, kept_slots=3 * history)  # fmt: skip
    placed = place(job.topology, parse(scheme))
    assert (max(map(sum, held)), max(on_disk)) == (node_nbytes(job, placed), disk_nbytes(job, placed))


@pytest.mark.parametrize("per_node", [1, 2])
def test_so_are_those_of_a_plan_for_ranks_that_share_state(options: dict[str, Any], root: Path, per_node: int) -> None:
    if SIZE % per_node or SIZE == 1:
        pytest.skip("runs on an even number of ranks")
    options |= on_node(root, per_node)
    with Checkpointer(redundancy="copy", replicated={"w": True}, **options) as ckpt:
        ckpt.prepare({"w": np.zeros(1_000_000, np.uint8), "x": np.full(500_000, RANK, np.uint8)})
        reports = COMM.allgather(ckpt.report())
    nodes = tuple(sorted({report["node"] for report in reports}))
    held = [sum(s["nbytes"] for r in reports if r["node"] == node for s in r["slots"]) for node in nodes]
    kinds = [[slot["what"] for slot in report["slots"]] for report in reports]
    assert kinds == [["own", "own", "share", "share", *["of others"] * 2 * (len(nodes) > 1)]] * SIZE
    alike = -(-1_000_000 // 256) * 256
    job = Job(nodes, per_node, 500_000 + alike, alike_nbytes=alike)
    assert max(held) == node_nbytes(job, place(job.topology, parse("copy")))


@pytest.mark.parametrize("light", [1, 3])
def test_so_are_those_of_a_plan_for_light_saves(options: dict[str, Any], light: int) -> None:
    weights = torch.nn.Parameter(torch.randn(200_000))
    optimizer = torch.optim.AdamW([weights])
    with Checkpointer(redundancy="copy", light=light, **options) as ckpt:
        for step in range(1, 12 * light):
            weights.grad = torch.randn(200_000)
            optimizer.step()
            ckpt.save(step, {"weights": weights, "optimizer": optimizer})
        ckpt.wait()
        report = ckpt.report()
    taken = [slot for each in (report, report["light"]) for slot in each["slots"]]
    job = Job(tuple(f"n{rank}" for rank in range(SIZE)), 1, 2_400_000, light=light)
    assert len(taken) == (2 + job.light_slots) * (1 + (SIZE > 1))
    expected = node_nbytes(job, place(job.topology, parse("copy")))
    assert expected <= max(COMM.allgather(sum(slot["nbytes"] for slot in taken))) < 1.02 * expected


# Failure domains


@on_4
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


@on_4
def test_hosts_that_the_file_does_not_name_are_named_in_a_warning(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, root: Path
) -> None:
    if RANK == 0:
        (root / "racks").write_text("node[0-1] A\n")
    COMM.Barrier()
    monkeypatch.setenv("MLFLASH_DOMAINS", str(root / "racks"))
    with caplog.at_level(logging.WARNING, "mlflash"), Checkpointer(**options):
        assert ("the failure domains of node2, node3 are not given" in caplog.text) == (RANK == 0)


@on_4
def test_what_slurm_says_of_each_node_is_found(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, couriers: SharedCouriers
) -> None:
    monkeypatch.setenv("SLURM_TOPOLOGY_ADDR", f"core.leaf{RANK // 2}.node{RANK}")
    monkeypatch.setenv("SLURM_TOPOLOGY_ADDR_PATTERN", "switch.switch.node")
    couriers.start()
    with Checkpointer(**options) as ckpt:
        assert ckpt.report()["partners"] == [(RANK + 2) % 4]
        assert ckpt.survives.endswith("any 1 leaf switch; not: leaf switches leaf0 and leaf1 together")
