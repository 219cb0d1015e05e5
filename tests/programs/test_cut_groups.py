"""Process groups of ranks that were lost: who waits in them hears of it, whatever gloo is doing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
from waiting import PATIENCE_S, until

pytest.importorskip("torch.distributed")
import torch
import torch.distributed as dist

from mlflash.adapters import kept_groups

PROGRAM = Path(__file__).with_name("cut_group_rank.py")


def test_a_wait_for_gloo_ends_when_its_group_is_cut_at_any_moment(tmp_path: Path) -> None:
    """gloo by itself waits for its timeout, which is ten minutes here, where it had bytes to send: in most rounds."""
    size, rounds = 3, 12
    words = [str(size), str(rounds), str(tmp_path / "store")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [subprocess.Popen([sys.executable, str(PROGRAM), str(rank), *words], env=environment, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for rank in range(size)]  # fmt: skip
    try:
        said = [rank.communicate(timeout=PATIENCE_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * size and all("well" in one for one in said), said


def test_a_rank_that_comes_late_to_a_new_group_is_waited_for_until_the_timeout_or_a_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank may import and read for minutes before it makes its groups, as a file system gives it what it reads."""
    monkeypatch.setattr(kept_groups, "_MEETS", timedelta(seconds=0.2))

    def make(name: str, rank: int, timeout_s: float) -> kept_groups.ExchangeableGroup:
        store = dist.FileStore(str(tmp_path / name), 2)
        return kept_groups._create(store, rank, 2, timedelta(seconds=timeout_s))

    def is_long_there(name: str) -> bool:
        path = tmp_path / name
        return path.exists() and time.time() - path.stat().st_mtime > 1 and path.stat().st_size > 0

    with ThreadPoolExecutor() as other:
        first = other.submit(make, "late", 0, PATIENCE_S)
        until(lambda: is_long_there("late"), "rank 0 to wait for more than gloo would")
        pair = make("late", 1, PATIENCE_S), first.result(PATIENCE_S)
        sums = [torch.ones(1), torch.ones(1)]
        assert all(work.wait() for work in [one.allreduce([part]) for one, part in zip(pair, sums, strict=True)])
        assert sums == [torch.tensor([2.0])] * 2
        first = other.submit(make, "lost", 0, 600)
        until(lambda: is_long_there("lost"), "rank 0 to wait")
        kept_groups.cut_all()
        with pytest.raises(kept_groups.ConnectionDropped, match="a rank was lost"):
            first.result(PATIENCE_S)
    with pytest.raises(dist.DistStoreError, match=r"1 of 2 ranks have come to a process group within 0\.1 s"):
        make("never", 0, 0.1)
