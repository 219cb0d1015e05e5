"""Tests that run on every rank of a real mpiexec: `make test-N`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import holds
import in_couriers
import pytest
from ranks import SharedCouriers, block_nbytes, comm, configure, couriers, nodes, root, small_blocks, tmp_path

__all__ = ["block_nbytes", "comm", "couriers", "nodes", "root", "small_blocks", "tmp_path"]


def pytest_configure(config: pytest.Config) -> None:
    configure(config)
    if config.pluginmanager.has_plugin("on_ranks"):
        in_couriers.reach_into_couriers()


TRANSPORTS = os.environ.get("MLFLASH_TEST_TRANSPORT", "p2p rma").split()


@pytest.fixture(params=TRANSPORTS)
def options(request: pytest.FixtureRequest, root: Path) -> dict[str, object]:
    """Settings of a Checkpointer on nodes of one rank each, for each transport that is tested."""
    from emulated import on_node  # it loads MPI

    return {"job": "t", **on_node(root), "transport": request.param, "timeout_s": 30.0}


@pytest.fixture
def process_group(root: Path) -> Iterator[None]:
    """All ranks, as torch's default group with gloo."""
    import torch
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    store = torch.distributed.FileStore(str(root / "store"), world.size)
    torch.distributed.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def hold_at() -> Iterator[Callable[[str], holds.Hold]]:
    """Hold whatever comes to a named point until it is let go."""
    yield holds.hold
    holds.let_go()


@pytest.fixture
def slow_at() -> Iterator[Callable[[str, float], holds.Hold]]:
    """Let the courier come late from a named point."""
    yield holds.slow
    holds.let_go()


@pytest.fixture
def fail_at() -> Iterator[Callable[[str], holds.Hold]]:
    """Let whatever comes to a named point fail, by a mistake of ours."""
    yield holds.fail
    holds.let_go()


@pytest.fixture
def replace(monkeypatch: pytest.MonkeyPatch, couriers: SharedCouriers) -> Callable[[str], None]:
    """Start couriers anew in which a function of `in_couriers` was called. Collective."""

    def replaced(name: str) -> None:
        monkeypatch.setenv(in_couriers.NAME, name)
        couriers.start()

    return replaced
