"""Fixtures of all tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import own_memory


@pytest.fixture
def shm() -> Iterator[Path]:
    """A directory of our own in /dev/shm, removed afterwards."""
    with own_memory() as path:
        yield path
