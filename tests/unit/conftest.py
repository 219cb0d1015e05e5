from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mlflash.memory.node_directory import NodeDirectory


@pytest.fixture(autouse=True)
def starts_no_courier(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let couriers be threads: a test of one process starts no others, and what it traps happens in it."""
    monkeypatch.setenv("MLFLASH_COURIER", "thread")


@pytest.fixture
def node_memory(shm: Path) -> Iterator[NodeDirectory]:
    memory = NodeDirectory(str(shm), "j", None)
    yield memory
    memory.close()
