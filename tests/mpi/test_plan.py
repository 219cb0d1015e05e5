"""What a plan says is what a Checkpointer makes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mlflash import Checkpointer
from mlflash.placement import place
from mlflash.planning.prospects import Job, node_nbytes
from mlflash.scheme import parse
from mlflash.survival import describe, of

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("scheme", ["none", "copy", "copy:2", "xor:3", "xor:8", "rs:2+2"])
def test_the_bytes_of_a_plan_are_those_that_the_files_take(options: dict[str, Any], scheme: str) -> None:
    comm = MPI.COMM_WORLD
    with Checkpointer(redundancy=scheme, **options) as ckpt:
        ckpt.prepare({"w": np.zeros(1_000_000, np.uint8)})
        taken = comm.allgather(sum(slot["nbytes"] for slot in ckpt.report()["slots"]))
        job = Job(tuple(f"n{rank}" for rank in range(comm.size)), 1, 1_000_000, block_nbytes=options["block_nbytes"])
        placed = place(job.topology, parse(scheme))
        assert max(taken) == node_nbytes(job, placed)
        assert ckpt.survives == describe(of(job.topology, placed))
