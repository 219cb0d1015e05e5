"""Ranks meet through a store of torch's, whatever earlier launches have left in it."""

from __future__ import annotations

import datetime
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as distributed
from waiting import PATIENCE_S

from mlflash.launch import torch_store

SIZE = 4
Store = Callable[[], Any]


@pytest.fixture(params=["tcp", "file", "hash"])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """Connects to a store as one more rank of it."""
    if request.param == "hash":
        one = distributed.HashStore()
        return lambda: one
    if request.param == "file":
        return lambda: distributed.FileStore(str(tmp_path / "store"), -1)
    server = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    within = datetime.timedelta(seconds=PATIENCE_S)
    return lambda: server and distributed.TCPStore("127.0.0.1", server.port, is_master=False, timeout=within)


def meet(connect: Store, text: str) -> list[str]:
    """Let all ranks come, and give what each gets."""

    def come(rank: int) -> str:
        return torch_store.share(distributed, connect(), rank, SIZE, text if rank == 0 else None, PATIENCE_S)

    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(come, range(SIZE)))


def test_all_ranks_get_the_text_of_their_launch(connect: Store) -> None:
    for text in ("10.0.0.1,4000,abc", "fe80::1,4000,def"):
        assert meet(connect, text) == [text] * SIZE


def test_what_ranks_of_earlier_launches_have_left_is_passed_by(connect: Store) -> None:
    """Of one that was killed when it had asked; when it was answered; and of a rank 0 that gave another text."""
    left, dead = distributed.PrefixStore("mlflash", connect()), secrets.token_hex(8)
    for rank in range(1, SIZE):
        left.set(f"ask/{rank}", f"{dead}{rank}")
    left.set(f"answer/{dead}1", "old")
    left.set(f"answer/{dead}2", "old")
    for rank in (2, 3):
        left.set(f"got/{dead}{rank}", "the word of a rank 0 that is dead")
    assert meet(connect, "new") == ["new"] * SIZE
    assert meet(connect, "newer") == ["newer"] * SIZE
