"""Small blocks and transfers, so that a small state has several of them."""

from __future__ import annotations

import pytest

from mlflash.state import layout

NAME = "MLFLASH_TEST_BLOCK_NBYTES"


def environment(nbytes: int = 16_384) -> dict[str, str]:
    """For programs that a test starts."""
    return {NAME: str(nbytes)}


def use_small_blocks(monkeypatch: pytest.MonkeyPatch, nbytes: int = 65_536) -> None:
    """In this process, and in the couriers that it starts."""
    monkeypatch.setattr(layout, "BLOCK_NBYTES", nbytes)
    monkeypatch.setenv(NAME, str(nbytes))
