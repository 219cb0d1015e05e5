"""Tests that run on every rank of a real mpiexec: `make test-N`."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import comm, configure, nodes, root

__all__ = ["comm", "nodes", "root"]


def pytest_configure(config: pytest.Config) -> None:
    configure(config)


@pytest.fixture(params=["p2p", "rma"])
def options(request: pytest.FixtureRequest, root: Path) -> dict[str, object]:
    """Settings of a Checkpointer on emulated nodes of one rank each, for both transports."""
    return {"job": "t", "memory": str(root), "ranks_per_node": 1, "transport": request.param, "timeout_s": 30.0,
            "block_nbytes": 65_536, "chunk_nbytes": 262_144}  # fmt: skip
