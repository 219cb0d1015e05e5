"""What a plan says is what a Checkpointer makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulated import on_node
from mpi4py import MPI

from mlflash import Checkpointer
from mlflash.config import slots_of
from mlflash.placement.protection_groups import place
from mlflash.placement.redundancy_scheme import parse
from mlflash.placement.survival import describe, of
from mlflash.planning.scheme_comparison import Job, node_nbytes

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("certify_after", [0, 1, 2])
@pytest.mark.parametrize("scheme", ["none", "copy", "copy:2", "xor:3", "xor:8", "rs:2+2"])
def test_the_bytes_of_a_plan_are_those_that_the_files_take(
    options: dict[str, Any], scheme: str, certify_after: int
) -> None:
    comm, held = MPI.COMM_WORLD, slots_of(certify_after)
    with Checkpointer(redundancy=scheme, certify_after=certify_after, **options) as ckpt:
        ckpt.prepare({"w": np.zeros(1_000_000, np.uint8)})
        taken = comm.allgather(sum(slot["nbytes"] for slot in ckpt.report()["slots"]))
        job = Job(tuple(f"n{rank}" for rank in range(comm.size)), 1, 1_000_000,
                  own_slots=held, copy_slots=held)  # fmt: skip
        placed = place(job.topology, parse(scheme))
        assert max(taken) == node_nbytes(job, placed)
        assert ckpt.survives == describe(of(job.topology, placed))


@pytest.mark.parametrize("per_node", [1, 2])
def test_so_are_those_of_a_plan_for_ranks_that_share_state(options: dict[str, Any], root: Path, per_node: int) -> None:
    comm = MPI.COMM_WORLD
    if comm.size % per_node or comm.size == 1:
        pytest.skip("runs on an even number of ranks")
    options |= on_node(root, per_node)
    with Checkpointer(redundancy="copy", replicated={"w": True}, **options) as ckpt:
        ckpt.prepare({"w": np.zeros(1_000_000, np.uint8), "x": np.full(500_000, comm.rank, np.uint8)})
        reports = comm.allgather(ckpt.report())
    nodes = tuple(sorted({report["node"] for report in reports}))
    held = [sum(s["nbytes"] for r in reports if r["node"] == node for s in r["slots"]) for node in nodes]
    kinds = [[slot["what"] for slot in report["slots"]] for report in reports]
    assert kinds == [["own", "own", "share", "share", *["of others"] * 2 * (len(nodes) > 1)]] * comm.size
    alike = -(-1_000_000 // 256) * 256
    job = Job(nodes, per_node, 500_000 + alike, alike_nbytes=alike)
    assert max(held) == node_nbytes(job, place(job.topology, parse("copy")))
