"""Tests that run on every rank of a real mpiexec: `make test-N`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import holds
import pytest
from ranks import comm, configure, nodes, root, tmp_path
from small_blocks import use_small_blocks

__all__ = ["comm", "nodes", "root", "tmp_path"]


def pytest_configure(config: pytest.Config) -> None:
    configure(config)
    if config.pluginmanager.has_plugin("on_ranks"):
        holds.reach_into_couriers()


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_blocks(monkeypatch)


TRANSPORTS = os.environ.get("MLFLASH_TEST_TRANSPORT", "p2p rma").split()


@pytest.fixture(params=TRANSPORTS)
def options(request: pytest.FixtureRequest, root: Path) -> dict[str, object]:
    """Settings of a Checkpointer on nodes of one rank each, for each transport that is tested."""
    from emulated import on_node  # it loads MPI

    return {"job": "t", **on_node(root), "transport": request.param, "timeout_s": 30.0}


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
