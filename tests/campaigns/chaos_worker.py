"""Rank program of chaos.py: train, save every few steps, write down what happened, until told to end."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time

import numpy as np
import records
from chaos_training import SHARED, Training
from meeting import COMM
from records import OUT
from waiting import take

import mlflash

os.environ["CHAOS_RANK"] = str(COMM.rank)  # of what this process starts, for chaos_launch.py


def note(event: str, **fields: object) -> None:
    records.note(event, COMM.rank, at=time.time(), **fields)


class Exchange:
    """Gives every rank what each gives in a step, by a file in memory that all have mapped.

    There are two places for what a rank gives, taken by turns: who gives anew has read what all gave the time before.
    """

    def __init__(self) -> None:
        shape = (2, COMM.size, SHARED + 1)
        if COMM.rank == 0:
            for name, kind in (("gifts", np.float32), ("times", np.int64)):
                np.lib.format.open_memmap(OUT / name, "w+", kind, shape if name == "gifts" else shape[:2])
        COMM.allgather(None)
        self._gifts, self._times = (np.lib.format.open_memmap(OUT / name, "r+") for name in ("gifts", "times"))
        self._time = 0

    def __call__(self, gift: np.ndarray, last: bool) -> tuple[np.ndarray, bool]:
        """Give a gift, and whether rank 0 says that this step is the last; gives those of all."""
        self._time += 1
        gifts, times = (one[self._time % 2] for one in (self._gifts, self._times))
        gifts[COMM.rank] = np.append(gift, np.float32(last))
        times[COMM.rank] = self._time
        while times.min() < self._time:
            take(1e-4)  # there are more ranks than cores: a spinning rank starves the others
        return np.array(gifts[:, :SHARED]), bool(gifts[0, SHARED])


def note_ended(pending: list[mlflash.Snapshot]) -> list[mlflash.Snapshot]:
    for snapshot in [s for s in pending if s.done]:
        if snapshot.committed:
            note("committed", step=snapshot.step)
        else:
            note("failed", step=snapshot.step, error=str(snapshot.error))
    return [s for s in pending if not s.done]


def run(every: int, timeout_s: float, pace_s: float, redundancy: str) -> None:
    """Restore and train."""
    training, exchange = Training(COMM.rank, np.random), Exchange()
    state = {"training": training, "rng": mlflash.rng()}
    progress = os.open(OUT / f"progress{COMM.rank}", os.O_WRONLY | os.O_CREAT)
    ckpt = mlflash.Checkpointer(timeout_s=timeout_s, redundancy=redundancy)
    try:
        start = ckpt.restore(state)
    except mlflash.errors.Unrestorable as error:
        note("unrestorable", reasons=error.reasons)
        ckpt.close()
        ckpt = mlflash.Checkpointer(timeout_s=timeout_s, redundancy=redundancy, fresh=OUT.name)
        start = ckpt.restore(state)
    with ckpt:
        note("restored", step=start, digest=training.digest(), of_step=training.step)
        pending: list[mlflash.Snapshot] = []
        healed, last = start is None, False
        while not last:
            saves = (training.step + 1) % every == 0
            gifts, last = exchange(training.give(), saves and COMM.rank == 0 and (OUT / "finish").exists())
            training.take(gifts)
            os.pwrite(progress, b"%12d" % training.step, 0)
            if training.step == (start or 0) + 1:
                note("first step")
            if saves:
                pending.append(ckpt.save(training.step, state))
            pending = note_ended(pending)
            if not healed and "heal" in ckpt.report()["seconds"]:
                healed = True
                note("healed")
            take(pace_s)
        ckpt.wait()
        note_ended(pending)
        note("end", step=training.step, digest=training.digest(), report=ckpt.report())


if __name__ == "__main__":
    stacks = os.open(OUT / f"stacks{COMM.rank}", os.O_WRONLY | os.O_CREAT)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    note("start")
    run(**json.loads(sys.argv[1]))
