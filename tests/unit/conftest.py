from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from mlflash.node_memory import NodeMemory

settings.register_profile("mlflash", deadline=None)  # a busy machine is no failure
settings.load_profile("mlflash")


@pytest.fixture
def node_memory(shm: Path) -> Iterator[NodeMemory]:
    memory = NodeMemory(str(shm), "j", None)
    yield memory
    memory.close()
