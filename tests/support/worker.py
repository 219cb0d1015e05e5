"""Rank programs for tests that kill and relaunch: a "training" whose state is known for every rank and step.

It uses numpy only, so that a rank starts in a fraction of a second.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import records
from meeting import COMM
from patience import reach_into_courier, set_patience
from records import OUT
from traps import kill_my_node, set_traps
from waiting import hang, take, until

import mlflash

faulthandler.register(signal.SIGUSR1)
RANK = COMM.rank
note = functools.partial(records.note, rank=RANK)


def state_at(rank: int, step: int, nbytes: int) -> dict[str, object]:
    """The state that a rank has after a step; another one for every rank and step."""
    random = np.random.default_rng((rank, step))
    return {
        "weights": random.integers(0, 256, nbytes, dtype=np.uint8),
        "moments": [random.standard_normal(1000 + rank), random.standard_normal((3, 5)).astype(np.float32)],
        "lr": 1 / (1 + step),
        "history": [rank, step, f"step {step}", None, b"\x00\xff", (True, float("inf"))],
    }


def differences(found: object, expected: object, path: str = "") -> list[str]:
    if isinstance(expected, np.ndarray):
        same = isinstance(found, np.ndarray) and found.dtype == expected.dtype and np.array_equal(found, expected)
        return [] if same else [path]
    if isinstance(expected, dict):
        return [d for k, v in expected.items() for d in differences(found[k], v, f"{path}.{k}")]
    if isinstance(expected, (list, tuple)):
        pairs = zip(found, expected, strict=True)
        return [d for i, (a, b) in enumerate(pairs) for d in differences(a, b, f"{path}.{i}")]
    return [] if type(found) is type(expected) and found == expected else [path]


def update(state: dict[str, object], new: dict[str, object]) -> None:
    """Train: change every leaf in place."""
    state["weights"][:] = new["weights"]
    for old, fresh in zip(state["moments"], new["moments"], strict=True):
        old[:] = fresh
    state["lr"], state["history"] = new["lr"], new["history"]


def train(last: int = 0, more: int = -1, nbytes: int = 300_000, die_at: int = -1, die_rank: int = -1, die: str = "",
          pause: float = 0.0, big_rank: int = -1, big_nbytes: int = 0, grow_at: int = 0,
          load: bool = False, one_by_one: bool = False, traps: Sequence[dict[str, object]] = (), strict: bool = True,
          alike: bool = False, goes_on: bool = False, options: dict[str, object] | None = None) -> None:  # fmt: skip
    """Restore, check the bits, train to the last step with a save after each, and perhaps die.

    Args:
        last: the last step; with ``more``: so many steps after the one restored.
        die: "committed": in the moment the snapshot is committed; "all": all ranks end without a word then.
        grow_at: from this step on the state is three times as large.
        load: take the state as fresh arrays, whatever its size, instead of filling one of known size.
        one_by_one: each save waits for its commit.
        alike: the weights are the same on all ranks, and shared.
        goes_on: whatever becomes of a save.
        traps: see traps.py.
    """
    set_traps(traps, RANK)
    size = big_nbytes if big_rank == RANK else nbytes + 1000 * RANK  # slots of different sizes

    def wanted(step: int) -> dict[str, object]:
        times = 3 if grow_at and step % 1000 >= grow_at else 1
        shared = {"weights": state_at(0, step, nbytes * times)["weights"]} if alike else {}
        return state_at(RANK, step, size * times) | shared

    state = wanted(0)
    replicated = {"weights": True} if alike else None
    with mlflash.Checkpointer(strict=strict, replicated=replicated, **(options or {})) as ckpt:
        try:
            if load:
                start, found = ckpt.load()
                state = wanted(0) if start is None else found
            else:
                start = ckpt.restore(state)
        except mlflash.errors.Unrestorable as error:
            note("unrestorable", reasons=error.reasons, text=str(error), wrong=differences(state, wanted(0)))
            return
        wrong = differences(state, wanted(start or 0))
        note("restored", step=start, wrong=wrong, report=ckpt.report())
        last = last if more < 0 else (start or 0) + more
        pending: list[mlflash.Snapshot] = []
        for step in range((start or 0) + 1, last + 1):
            if step == grow_at:
                state = wanted(step)
            update(state, wanted(step))
            note("saving", step=step)
            snapshot = ckpt.save(step, state)
            update(state, wanted(step + 1000))  # at once, as the promise says
            if step == die_at and (die == "all" or die_rank == RANK):
                die_of(die, snapshot)
            take(pause)
            if one_by_one:
                wait_for(snapshot, goes_on)
            pending = note_committed([*pending, snapshot])
            if one_by_one:  # for the courier a save is over a moment after its end is known here
                until(lambda: not ckpt._courier._jobs, "the courier to have done what it was asked for")
        ckpt.wait()
        note("end", steps=ckpt.steps(), report=ckpt.report())


def note_committed(pending: list[mlflash.Snapshot]) -> list[mlflash.Snapshot]:
    committed = [snapshot for snapshot in pending if snapshot.committed]
    for snapshot in committed:
        note("committed", step=snapshot.step)
    return [snapshot for snapshot in pending if snapshot not in committed]


def wait_for(snapshot: mlflash.Snapshot, goes_on: bool) -> None:
    """Wait for a save; note that it has failed where training goes on all the same."""
    try:
        snapshot.wait()
    except mlflash.errors.SaveFailed as error:
        if not goes_on:
            raise
        note("failed", step=snapshot.step, error=str(error))


def die_of(how: str, snapshot: mlflash.Snapshot) -> None:
    if how == "committed":
        while not snapshot.committed:
            pass
        kill_my_node(wipe=True)
    snapshot.wait()
    note("committed", step=snapshot.step)
    COMM.Barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def error_of(call: Callable[[], object]) -> str:
    """What mlflash raises in a call; "": nothing."""
    try:
        call()
    except mlflash.errors.MlflashError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def wait_past_deadline(stop_s: float) -> None:
    """Rank 0 saves while the last rank is stopped: the wait ends, training goes on, and it catches up.

    Whoever stops it makes the file "stopped" among the records when it is.
    """
    reach_into_courier(RANK)
    if RANK == 0:  # once the late save is committed, its courier is not done with it for a while
        set_traps([{"path": ["commit.seen"] * 2, "action": "pause", "rank": 0}], 0)
    state = state_at(RANK, 1, 100_000)
    with mlflash.Checkpointer() as ckpt:
        ckpt.save(1, state).wait()
        note("ready")
        until((OUT / "stopped").exists, "the last rank to be stopped")  # it comes past this when it goes on
        if COMM.size - 1 != RANK:
            set_patience(ckpt, RANK, stop_s)
        late = ckpt.save(2, state)
        try:
            late.wait()
        except mlflash.errors.DeadlineExceeded as error:
            note("late", text=str(error), ranks=error.ranks, nodes=error.nodes)
        set_patience(ckpt, RANK, 3600)  # the last rank goes on when all others are past the next save: it must not wait
        next_one = ckpt.save(3, state)
        slots = [(slot["use"], slot["step"]) for slot in ckpt.report()["slots"]]
        note("next", error=str(next_one.error), slots=slots)
        until(lambda: late.committed and next_one.done, "the late step to be committed after all")
        note("caught up", late=late.committed, next=next_one.committed)
        ckpt.save(4, state).wait()
        note("end", steps=ckpt.steps())


def keep_saving(last: int, nbytes: int = 300_000, grow_at: int = 0, pause: float = 0.0, busy_until: str = "",
                hold_at: int = 0, clock: float = 1.0, hangs: bool = False, traps: Sequence[dict[str, object]] = (),
                options: dict[str, object] | None = None) -> None:  # fmt: skip
    """Train on whatever becomes of the saves, and note what does.

    Args:
        grow_at: from this step on the state is three times as large.
        busy_until: do not end before this file is among the records, and save all the while.
        hold_at: do not begin this step before the file "go on" is among the records.
        clock: so many times as fast runs the clock of all deadlines.
        hangs: after the last save, until the test kills the job.
    """
    set_traps(traps, RANK)
    if clock != 1:
        now = time.monotonic
        time.monotonic = lambda: clock * now()
    nbytes += 1000 * RANK
    with mlflash.Checkpointer(**(options or {})) as ckpt:
        start, found = ckpt.load()
        if start is None:
            ckpt.prepare(state_at(RANK, 0, nbytes)) if not traps else None
        wrong = [] if start is None else differences(found, state_at(RANK, start, nbytes * _growth(start, grow_at)))
        note("restored", step=start, wrong=wrong)
        step = start or 0
        while step < last or (busy_until and not COMM.bcast((OUT / busy_until).exists())):
            step += 1
            if step == hold_at:
                until((OUT / "go on").exists, "the test to say go on")
            snapshot = ckpt.save(step, state_at(RANK, step, nbytes * _growth(step, grow_at)))
            try:
                snapshot.wait()
                note("committed", step=step)
            except mlflash.errors.SaveFailed as error:
                note("failed", step=step, error=str(error), cause=type(error.__cause__).__name__)
            take(pause)
        if hangs:
            note("through")
            hang()
        note("end", steps=ckpt.steps(), report=ckpt.report())


def _growth(step: int, grow_at: int) -> int:
    return 3 if grow_at and step >= grow_at else 1


def save_and_wait(last: int, nbytes: int, timeout_s: float, when_late: str, hold_at: int = 0,
                  traps: Sequence[dict[str, object]] = ()) -> None:  # fmt: skip
    """Save each step and wait for its commit, on nodes whose cable is cut.

    The step ``hold_at`` does not begin before the file "go on" is among the records. When a commit is late, "leave"
    notes it and ends without a word, as a job does that wants to be relaunched elsewhere, but not before the file
    "leave" is there, when all others have had their say; "stay" waits on.
    """
    set_traps(traps, RANK)
    nbytes += 1000 * RANK
    state = state_at(RANK, 0, nbytes)
    with mlflash.Checkpointer(timeout_s=timeout_s) as ckpt:
        start = ckpt.restore(state)
        note("restored", step=start, wrong=differences(state, state_at(RANK, start or 0, nbytes)), report=ckpt.report())
        for step in range((start or 0) + 1, last + 1):
            update(state, state_at(RANK, step, nbytes))
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
                    until((OUT / "leave").exists, "the test to say leave")
                    os._exit(3)
                until(lambda late=snapshot: late.done, "the late step")
            note("committed", step=step, commit_s=snapshot.commit_s)
        note("end", steps=ckpt.steps(), report=ckpt.report())


def follow(verbs: Sequence[Sequence[object]], nbytes: int = 100_000, traps: Sequence[dict[str, object]] = (),
           options: dict[str, object] | None = None) -> None:  # fmt: skip
    """Restore, do what verbs (see `_Follower`) say on all ranks, and close; note what becomes of each."""
    set_traps(traps, RANK)
    ckpt = mlflash.Checkpointer(**(options or {}))
    follower = _Follower(ckpt, nbytes, str((options or {}).get("directory", "")))
    for verb, *given in [["restore"], *verbs]:
        getattr(follower, str(verb))(*given)
    note("end", error=error_of(ckpt.close), report=ckpt.report())


class _Follower:
    """Does what `follow` is told. Part of the state is the same on all ranks, so that a drain deals it out."""

    def __init__(self, ckpt: mlflash.Checkpointer, nbytes: int, directory: str):
        self._ckpt, self._nbytes, self._directory = ckpt, nbytes, directory
        self._nbytes_at: dict[int, int] = {}  # of the steps saved before the state grew
        self._state = self._wanted(0)
        self._step = 0

    def _wanted(self, step: int) -> dict[str, object]:
        nbytes = self._nbytes_at.get(step, self._nbytes)
        return {**state_at(RANK, step, nbytes + 1000 * RANK), "common": state_at(0, step, nbytes)["weights"]}

    def _change(self, step: int) -> None:
        new = self._wanted(step)
        update(self._state, new)
        self._state["common"][:] = new["common"]

    def restore(self) -> None:
        step = self._ckpt.restore(self._state)
        self._step = step or 0
        note("restored", step=step, wrong=differences(self._state, self._wanted(self._step)))

    def restore_from(self, *directories: str) -> None:
        for directory in directories:
            self._state = self._wanted(0)
            step = self._ckpt.restore(self._state, source=directory)
            wrong = differences(self._state, self._wanted(step or 0))
            note("restored from", source=directory, step=step, wrong=wrong)

    def save(self, times: int = 1, pause: float = 0.0) -> None:
        """Save the next steps, each waited for."""
        for _ in range(times):
            self._step += 1
            self._change(self._step)
            snapshot = self._ckpt.save(self._step, self._state)
            self._change(self._step + 1000)  # at once, as the promise says
            try:
                snapshot.wait()
                note("committed", step=snapshot.step)
            except mlflash.errors.MlflashError as error:
                note("failed", step=snapshot.step, error=str(error))
            take(pause)

    def grow(self) -> None:
        """Let the state be three times as large from now on."""
        self._nbytes_at |= dict.fromkeys(range(self._step + 1), self._nbytes)
        self._nbytes *= 3
        self._state = self._wanted(self._step + 1)

    def begin_drain(self) -> None:
        self._drain = self._ckpt.drain()

    def end_drain(self) -> None:
        error = error_of(lambda: self._drain.wait(40))
        note("drain", step=self._drain.step, path=self._drain.path, error=error)

    def drain(self) -> None:
        self.begin_drain()
        self.end_drain()

    def save_while_it_drains(self) -> None:
        while not all(COMM.allgather(self._drain.done)):
            self.save()
        self.end_drain()

    def wait_drained(self, timeout_s: float | None = None) -> None:
        note("waited", error=error_of(lambda: self._ckpt.wait_drained(timeout_s)))

    def hurry(self, timeout_s: float) -> None:
        """Let what waits for a drain end after so many seconds; saves have as long as they had."""
        object.__setattr__(self._ckpt._config, "timeout_s", timeout_s)

    def rules(self, text: str) -> None:
        """Let the file system fail, see faulty_files.c."""
        self.run(f"printf '{text}\\n' > {os.environ.get('FAULTY_RULES')}")

    def run(self, command: str) -> None:
        """Run a shell command, while no rank does anything."""
        COMM.Barrier()
        if RANK == 0:
            subprocess.run(command, shell=True, check=True, timeout=30)
        COMM.Barrier()

    def look(self, name: str) -> None:
        COMM.Barrier()
        top = Path(self._directory)
        if RANK == 0:
            note(name, files=sorted(str(path.relative_to(top)) for path in top.rglob("*") if path.is_file()))
        COMM.Barrier()

    def check(self, *steps: int) -> None:
        """Load checkpoints from the directory, and compare every bit."""
        for step in steps:
            loaded, state = self._ckpt.load(step, source=self._directory)
            note("checked", step=loaded, wrong=differences(state, self._wanted(step)))


def leave_by_exception() -> None:
    """One rank leaves the with block by an exception in the middle of a save."""
    state = state_at(RANK, 1, 3_000_000)
    with mlflash.Checkpointer() as ckpt:
        ckpt.save(1, state).wait()
        note("committed", step=1)
        COMM.Barrier()
        ckpt.save(2, state)
        if COMM.size - 1 == RANK:
            note("raised")
            raise RuntimeError("training went wrong")
        hang()


if __name__ == "__main__":
    note("start")
    spec = json.loads(sys.argv[1])
    globals()[spec.pop("program", "train")](**spec)
