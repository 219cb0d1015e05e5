"""Fixtures of folders whose tests have couriers of their own process: those of a module share one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import holds
import pytest
from processes import described, left_here
from waiting import until

from mlflash.channel import connection


@pytest.fixture(autouse=True, scope="module")
def leaves_no_process() -> Iterator[None]:
    """Say which module has left a process: others wait for the end of all that their worker has started."""
    yield
    connection.close_all()
    until(lambda: not left_here(), lambda: f"the end of {sorted(map(described, left_here()))}")


@pytest.fixture
def in_couriers(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
                ) -> Iterator[Callable[[str], None]]:  # fmt: skip
    """Lets the couriers that a test starts from then on begin with a line of Python."""
    folder: Path = tmp_path_factory.mktemp("armed")
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ['PYTHONPATH']}")

    def begin_with(line: str) -> None:
        connection.close_all()
        (folder / "armed.py").write_text(f"def arm():\n    {line}\n")
        monkeypatch.setenv("MLFLASH_TEST_ARMS", "armed")

    yield begin_with
    connection.close_all()


@pytest.fixture
def held_couriers(in_couriers: Callable[[str], None], tmp_path_factory: pytest.TempPathFactory,
                  monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:  # fmt: skip
    """Lets the couriers that a test starts be held; see `holds`."""
    monkeypatch.setenv("MLFLASH_TEST_HOLDS", str(tmp_path_factory.mktemp("holds")))
    in_couriers("import holds; holds.arm()")
    yield
    holds.let_go()
