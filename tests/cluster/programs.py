"""Rank programs for nodes whose cable is cut; `tests/support/worker.py` has the rest."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from traps import set_traps
from waiting import until
from worker import OUT, RANK, differences, note, state_at, update

import mlflash


def save_and_wait(last: int, nbytes: int, timeout_s: float, when_late: str, hold_at: int = 0,
                  traps: Sequence[dict[str, object]] = ()) -> None:  # fmt: skip
    """Save each step and wait for its commit.

    The step ``hold_at`` does not begin before the file "go on" is among the records. When a commit is late, "leave"
    notes it and ends at once, as a job does that wants to be relaunched elsewhere; "stay" waits on.
    """
    set_traps(traps, RANK)
    state = state_at(RANK, 0, nbytes + 1000 * RANK)
    with mlflash.Checkpointer(timeout_s=timeout_s) as ckpt:
        start = ckpt.restore(state)
        wrong = differences(state, state_at(RANK, start or 0, nbytes + 1000 * RANK))
        note("restored", step=start, wrong=wrong, report=ckpt.report())
        for step in range((start or 0) + 1, last + 1):
            update(state, state_at(RANK, step, nbytes + 1000 * RANK))
            if step == hold_at:
                note("holds")
                until((OUT / "go on").exists, "the test to say go on")
            snapshot = ckpt.save(step, state)
            note("saved", step=step)
            try:
                snapshot.wait()
            except mlflash.errors.DeadlineExceeded as error:
                note("late", step=step, text=str(error), ranks=error.ranks, nodes=error.nodes)
                if when_late == "leave":
                    leave()
                until(lambda late=snapshot: late.done, "the late step")
            note("committed", step=step, commit_s=snapshot.commit_s)
        note("end", steps=ckpt.steps(), report=ckpt.report())


def leave() -> None:
    """End without a word, and wait for nobody; but not before all others have had their say."""
    until((OUT / "leave").exists, "the test to say leave")
    note("left")
    os._exit(3)


if __name__ == "__main__":
    note("start")
    spec = json.loads(sys.argv[1])
    globals()[spec.pop("program")](**spec)
