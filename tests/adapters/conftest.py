"""Adapters to real frameworks, on four ranks of a real mpiexec, unless a test says how many: `make adapters`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import late
import pytest
from ranks import comm, configure, couriers, nodes, root, small_blocks, tmp_path

from mlflash import crash_points

__all__ = ["comm", "couriers", "nodes", "root", "small_blocks", "tmp_path"]
QUIET = ("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")  # of torch and Megatron


def pytest_configure(config: pytest.Config) -> None:
    configure(config)


@pytest.hookimpl(tryfirst=True)  # before the plugin that looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings(*QUIET))
            if item.get_closest_marker("mpi") is None:
                item.add_marker(pytest.mark.mpi(min_size=4))


@pytest.fixture
def block_nbytes() -> int:
    return 16_384


@pytest.fixture
def options(root: Path) -> dict[str, object]:
    from emulated import on_node  # it loads MPI

    return {"job": "t", **on_node(root, 2), "transport": "p2p", "timeout_s": 30.0}


@pytest.fixture(params=["argument", "environment"])
def enabled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param == "environment":
        monkeypatch.setenv("MLFLASH_DISABLE", "1")
    return bool(request.param == "environment")


@pytest.fixture
def came() -> Iterator[list[None]]:
    """What is copied later is copied as late as it may; notes where a step waited."""
    found: list[None] = []
    late.copy_late(lambda: found.append(None))
    yield found
    crash_points.arm(None)
