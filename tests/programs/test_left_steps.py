"""Steps that are left at a collective, as where a rank is lost, and process groups that are cut."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from waiting import PATIENCE_S, until

from mlflash.adapters import kept_groups

_LIMIT_S = 3 * PATIENCE_S  # 20 trainings of two ranks, beside ranks of Open MPI that spin


def printed_by(script: str, size: int, *words: object) -> list[str]:
    """Run a script on so many ranks, each of which gets its number and some words."""
    program = [sys.executable, str(Path(__file__).with_name(script))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [subprocess.Popen([*program, str(rank), *map(str, words)], env=environment, text=True,
                              stdout=subprocess.PIPE) for rank in range(size)]  # fmt: skip
    try:
        printed = [rank.communicate(timeout=_LIMIT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate(timeout=PATIENCE_S)
    assert [rank.returncode for rank in ranks] == [0] * size, printed
    return printed


@pytest.mark.parametrize(("kind", "ranks"), [
    ("DDP", 2), ("FSDP2", 2), ("FSDP2 in parts", 2), ("HSDP", 4), ("TP", 2), ("DDP compiled", 2),
    ("FSDP2 compiled", 2), ("TP compiled", 2),
])  # fmt: skip
def test_a_step_left_at_any_collective_gets_the_same_bits(kind: str, ranks: int) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    said = [json.loads(text) for text in printed_by("left_step_rank.py", ranks, ranks, kind, store.port)]
    for rank in said:
        assert rank["same"] == [True] * rank["collectives"] and rank["collectives"] >= 2, rank
        assert rank["opened"][-1] == rank["opened"][1], "descriptors and threads"
    assert len(said[-1]["raised"]) == said[-1]["collectives"], "which drops its connections"
    print(kind, [round(1e3 * max(rank["took"])) for rank in said], "ms at most")


def test_a_wait_for_gloo_ends_when_its_group_is_cut_at_any_moment(tmp_path: Path) -> None:
    """gloo by itself waits for its timeout, which is ten minutes here, where it had bytes to send: in most rounds."""
    size, rounds = 3, 12
    printed = printed_by("cut_group_rank.py", size, size, rounds, tmp_path / "store")
    assert all("well" in text for text in printed), printed


def test_a_rank_late_to_a_new_group_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert all(work.wait() for work in [group.allreduce([part]) for group, part in zip(pair, sums, strict=True)])
        assert sums == [torch.tensor([2.0])] * 2
        first = other.submit(make, "lost", 0, 600)
        until(lambda: is_long_there("lost"), "rank 0 to wait")
        kept_groups.cut_all()
        with pytest.raises(kept_groups.ConnectionDropped, match="a rank was lost"):
            first.result(PATIENCE_S)
    with pytest.raises(dist.DistStoreError, match=r"1 of 2 ranks have come to a process group within 0\.1 s"):
        make("never", 0, 0.1)
