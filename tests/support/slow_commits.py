"""Commits that take time in the courier of a rank, which notes each; its trainer says when."""

from __future__ import annotations

import json
import os
from pathlib import Path

import traps
from traps import OUT
from waiting import take, until

from mlflash import crash_points

_SLOW_S = 0.3


def reach_into_courier(rank: int) -> None:
    """Let commits of this rank be slow later. Before it has a courier, which has traps, too."""
    os.environ["MLFLASH_TEST_ARMS"] = "slow_commits"
    traps.set_traps([], rank)


def begin(rank: int, run: str, holds_first: bool) -> None:
    """Let commits take time from now on, and note them as those of a run; the first takes until `let_go`."""
    if holds_first:
        _held(rank).touch()
    new = OUT / f"new-slow-{rank}"
    new.write_text(run)
    new.rename(_slow(rank))


def let_go(rank: int) -> None:
    _held(rank).unlink(missing_ok=True)


def end(rank: int) -> None:
    _slow(rank).unlink(missing_ok=True)
    let_go(rank)


def arm() -> None:
    rank, trapped = traps.my_rank(), traps.armed()

    def reached(point: str) -> None:
        trapped(point)
        if point == "commit.recorded" and _slow(rank).exists():
            run = _slow(rank).read_text()
            until(lambda: not _held(rank).exists(), "training goes on while the first save is committed")
            take(_SLOW_S)
            with (OUT / f"rank{rank}.jsonl").open("a") as file:
                file.write(json.dumps({"event": "commit", "rank": rank, "pid": os.getpid(), "run": run}) + "\n")

    crash_points.arm(reached)


def _slow(rank: int) -> Path:
    return OUT / f"slow-{rank}"


def _held(rank: int) -> Path:
    return OUT / f"held-{rank}"
