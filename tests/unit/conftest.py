from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from own_couriers import held_couriers, in_couriers, leaves_no_process  # noqa: F401
from small_blocks import use_small_blocks

from mlflash.memory.node_directory import NodeDirectory


@pytest.fixture
def node_memory(shm: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeDirectory]:
    use_small_blocks(monkeypatch, 4096)
    memory = NodeDirectory(str(shm), "j")
    yield memory
    memory.close()
