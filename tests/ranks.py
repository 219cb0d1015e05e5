"""Fixtures of tests that run on every rank of a real mpiexec."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


def require_ranks(config: pytest.Config) -> None:
    """Refuse to run on other ranks than were asked for."""
    from mpi4py import MPI

    wanted = os.environ.get("MLFLASH_TEST_RANKS")
    if wanted is None or not config.getoption("--only-mpi") or MPI.COMM_WORLD.size != int(wanted):
        raise pytest.UsageError(f"these tests run under mpiexec: make test-N (asked for {wanted} ranks, "
                                f"got {MPI.COMM_WORLD.size})")  # fmt: skip


@pytest.fixture
def comm() -> object:
    from mpi4py import MPI

    MPI.COMM_WORLD.Barrier()
    return MPI.COMM_WORLD


@pytest.fixture
def root(comm: object) -> Iterator[Path]:
    """One directory in /dev/shm for all ranks."""
    path = comm.bcast(tempfile.mkdtemp(prefix="mlflash-test-", dir="/dev/shm") if comm.rank == 0 else None)
    yield Path(path)
    comm.Barrier()
    if comm.rank == 0:
        shutil.rmtree(path)


@pytest.fixture
def nodes(root: Path) -> object:
    """The memory of the emulated nodes under ``root``."""
    from emulated import Nodes

    return Nodes(root)
