"""Tests that run on every rank of a real mpiexec: `make test-N`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ranks import comm, configure, nodes, root, tmp_path
from waiting import PATIENCE_S

from mlflash import crash_points

__all__ = ["comm", "nodes", "root", "tmp_path"]


def pytest_configure(config: pytest.Config) -> None:
    configure(config)


@pytest.fixture(params=["p2p", "rma"])
def options(request: pytest.FixtureRequest, root: Path) -> dict[str, object]:
    """Settings of a Checkpointer on emulated nodes of one rank each, for both transports."""
    return {"job": "t", "memory": str(root), "ranks_per_node": 1, "transport": request.param, "timeout_s": 30.0,
            "block_nbytes": 65_536, "chunk_nbytes": 262_144}  # fmt: skip


@pytest.fixture
def hold_at() -> Iterator[Callable[[str], threading.Event]]:
    """Hold whatever comes to a named point until an event is set."""

    def hold(point: str) -> threading.Event:
        go_on = threading.Event()

        def reached(name: str) -> None:
            if name == point:
                go_on.wait(PATIENCE_S)

        crash_points.arm(reached)
        return go_on

    yield hold
    crash_points.arm(None)
