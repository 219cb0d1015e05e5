"""A trainer of two, of which one, its courier or its agent comes to an end; see tests/programs/test_deaths.py."""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import records
from courier_worker import end, is_same, state_at
from traps import set_traps
from waiting import PATIENCE_S, hang, take, until

import mlflash
from mlflash.launch.courier_mpi import mapped_by
from mlflash.launch.rendezvous import who_am_i

STEP_KILLED = "step killed"  # while the second save is committed, and holds
SAVES_RETURNED = "saves returned"  # on both ranks, a moment ago
RANK = who_am_i(os.environ).rank
OUT = Path(os.environ["OUT"])
note = functools.partial(records.note, rank=RANK)


def main(
    settings: dict[str, Any], who: str = "", how: str = "", rank: int = 1, saves: int = 0, patient: bool = False
) -> None:
    """Restore, save two steps, perhaps come to an end while the second one is committed, and save until one more is.

    Args:
        who: trainer | courier | agent; "": nobody.
        how: what happens to it.
        rank: whose it is; -1: both.
        saves: before it, where all have returned.
        patient: wait for a save that is late, as often as it takes.
    """
    if how == STEP_KILLED:
        set_traps([{"path": ["commit.released", "protect.announced"], "action": "hold", "rank": rank}], RANK)
    ckpt = mlflash.Checkpointer(**settings)
    state = state_at(0)
    step = ckpt.restore(state)
    note("restored", step=step, same=is_same(state, state_at(step or 0)))
    if not who:
        ckpt.close()
        return
    if how == SAVES_RETURNED:
        save_and_die(ckpt, step or 0, saves, rank)
    couriers = ckpt._courier._connection.couriers
    ckpt.save(1, state_at(1)).wait()
    note("mapped", names=sorted(mapped_by(couriers.courier.pid)))
    ckpt.save(2, state_at(2))
    (OUT / f"both{RANK}").touch()  # who ends by an exception ends the other rank, too, whose save has to have returned
    until(lambda: len([*OUT.glob("both*")]) == 2, "the other rank's save to return")
    if how in ("terminal closed", STEP_KILLED):
        note("victim")
        hang()
    elif rank == RANK:
        pids = {"trainer": os.getpid(), "courier": couriers.courier.pid, "agent": couriers.agent.pid}
        note("victim", pid=pids[who])
        if how == "killed with children":
            have_children()
        end(how, pids[who])
    elif how == "raises":
        hang()
    if patient:
        for step in (3, 4):
            wait_until_committed(ckpt.save(step, state_at(step)))
        note("end", steps=ckpt.steps())
    else:  # not asked of `steps`, which may be interrupted on one rank only, as a victim may take a while to die
        note("end", steps=[save_until_one_is_committed(ckpt)])
    ckpt.close()


def save_until_one_is_committed(ckpt: mlflash.Checkpointer) -> int:
    """Save one step after the other; gives the last one."""
    deadline = time.monotonic() + PATIENCE_S
    for step in itertools.count(3):
        note("saving")
        try:
            ckpt.save(step, state_at(step)).wait()
            break
        except mlflash.errors.SaveFailed as error:  # a courier has ended: the next one goes on, if there may be one
            if "has left the job" in str(error):
                break
            assert time.monotonic() < deadline, error
    return step


def wait_until_committed(snapshot: Any) -> None:
    while not snapshot.committed:
        try:
            snapshot.wait()
        except mlflash.errors.DeadlineExceeded:
            note("late")
            take(1.0)


def save_and_die(ckpt: mlflash.Checkpointer, step: int, saves: int, rank: int) -> None:
    """Be killed right after the last of some saves has returned on both ranks, or be left."""
    for number in range(step + 1, step + saves + 1):
        snapshot = ckpt.save(number, state_at(number))
        if number < step + saves:
            snapshot.wait()
    note("saved", step=step + saves)
    (OUT / f"returned{RANK}").touch()
    until(lambda: len([*OUT.glob("returned*")]) == 2, "the other rank's save to return")
    if rank in (RANK, -1):
        os.kill(os.getpid(), signal.SIGKILL)
    hang()


def have_children() -> None:
    """Fork processes as a DataLoader has them, which hold all descriptors."""
    for _ in range(4):
        if os.fork() == 0:
            until((OUT / "go").exists, "the test to let the children go")
            os._exit(0)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
