from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let couriers be threads: each test has a server with its own credentials, or files of its process."""
    monkeypatch.setenv("MLFLASH_COURIER", "thread")
