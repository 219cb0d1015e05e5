"""Fixtures of all tests."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def shm() -> Iterator[Path]:
    """A directory of our own in /dev/shm, removed afterwards."""
    path = Path(tempfile.mkdtemp(prefix="mlflash-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)
