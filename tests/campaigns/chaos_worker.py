"""Rank program of chaos.py: train, save every few steps, write down what happened, until told to end."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import worker
from records import OUT
from waiting import take
from worker import COMM, RANK, differences, state_at

import mlflash

NBYTES = 500_000  # and more at each of these steps
GROWTH = (150, 500, 1200, 2500, 5000, 9000, 14000, 20000)
os.environ["CHAOS_RANK"] = str(RANK)  # of what this process starts, for chaos.py


def note(event: str, **fields: object) -> None:
    worker.note(event, at=time.time(), **fields)


class Training:
    """A training whose state is known for every rank and step."""

    def __init__(self) -> None:
        self.become(0)

    @staticmethod
    def _at(step: int) -> dict[str, object]:
        return state_at(RANK, step, NBYTES * (1 + RANK) * (1 + sum(step >= grows for grows in GROWTH)))

    def become(self, step: int) -> None:
        self.step, self.state = step, self._at(step)

    @property
    def wrong(self) -> list[str]:
        return differences(self.state, self._at(self.step))

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "state": self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.state = state["step"], state["state"]


def note_ended(pending: list[mlflash.Snapshot]) -> list[mlflash.Snapshot]:
    for snapshot in [snapshot for snapshot in pending if snapshot.done]:
        if snapshot.committed:
            note("committed", step=snapshot.step)
        else:
            note("failed", step=snapshot.step, error=str(snapshot.error))
    return [snapshot for snapshot in pending if not snapshot.done]


def run(every: int, timeout_s: float, pace_s: float, redundancy: str) -> None:
    """Restore and train."""
    training = Training()
    state = {"training": training}
    progress = os.open(OUT / f"progress{RANK}", os.O_WRONLY | os.O_CREAT)
    ckpt = mlflash.Checkpointer(timeout_s=timeout_s, redundancy=redundancy)
    try:
        start = ckpt.restore(state)
    except mlflash.errors.Unrestorable as error:
        note("unrestorable", reasons=error.reasons)
        ckpt.close()
        ckpt = mlflash.Checkpointer(timeout_s=timeout_s, redundancy=redundancy, fresh=OUT.name)
        start = ckpt.restore(state)
    with ckpt:
        note("restored", step=start, of_step=training.step, wrong=training.wrong)
        pending: list[mlflash.Snapshot] = []
        reprotected, last = start is None, False
        while not last:
            training.become(training.step + 1)
            saves = training.step % every == 0
            if saves:  # as a step of a training waits for all ranks
                last = COMM.allgather((OUT / "finish").exists())[0]
            os.pwrite(progress, b"%12d" % training.step, 0)
            if training.step == (start or 0) + 1:
                note("first step")
            if saves:
                pending.append(ckpt.save(training.step, state))
            pending = note_ended(pending)
            if not reprotected and "reprotect" in ckpt.report()["seconds"]:
                reprotected = True
                note("reprotected")
            take(pace_s)
        ckpt.wait()
        note_ended(pending)
        note("end", step=training.step, report=ckpt.report())


if __name__ == "__main__":
    note("start")
    run(**json.loads(sys.argv[1]))
