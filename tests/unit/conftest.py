from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import described, left_here
from small_blocks import use_small_blocks
from waiting import until

from mlflash.memory.node_directory import NodeDirectory


@pytest.fixture(autouse=True)
def starts_no_courier(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let couriers be threads: a test of one process starts no others, and what it traps happens in it."""
    monkeypatch.setenv("MLFLASH_COURIER", "thread")


@pytest.fixture(autouse=True, scope="module")
def leaves_no_process() -> Iterator[None]:
    """Say which module has left a process: others wait for the end of all that their worker has started."""
    yield
    until(lambda: not left_here(), lambda: f"the end of {sorted(map(described, left_here()))}")


@pytest.fixture
def node_memory(shm: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeDirectory]:
    use_small_blocks(monkeypatch, 4096)
    memory = NodeDirectory(str(shm), "j")
    yield memory
    memory.close()
