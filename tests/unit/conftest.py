from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mlflash.memory.node_directory import NodeDirectory


@pytest.fixture
def node_memory(shm: Path) -> Iterator[NodeDirectory]:
    memory = NodeDirectory(str(shm), "j", None)
    yield memory
    memory.close()
