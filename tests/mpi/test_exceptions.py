"""Exceptions in and beside saves, on ranks: each save has one outcome, on all of them, and the next one goes on."""

from __future__ import annotations

import collections
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulated import on_node
from holds import Hold
from mpi4py import MPI
from waiting import PATIENCE_S

from mlflash import Checkpointer, crash_points, errors
from mlflash.save import stage

pytestmark = pytest.mark.mpi
two = pytest.mark.mpi(min_size=2)
RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
LAST = SIZE - 1


@pytest.fixture
def ckpt(root: Path) -> Iterator[Checkpointer]:
    with Checkpointer(job="t", **on_node(root), timeout_s=PATIENCE_S) as ckpt:
        yield ckpt


def state_of(step: int) -> dict[str, Any]:
    return {"x": np.full(30_000, 100 * step + RANK), "n": step}


def assert_goes_on(ckpt: Checkpointer, step: int) -> None:
    """Save a step on all ranks; it must be committed and come back."""
    assert ckpt.save(step, state_of(step)).wait().committed
    newest, state = ckpt.load()
    assert (newest, state["n"]) == (step, step)
    assert np.array_equal(state["x"], state_of(step)["x"])


class Foreign:
    def __init__(self, error: BaseException | None):
        self.error = error

    def state_dict(self) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        return {"y": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Unshowable(Exception):
    def __repr__(self) -> str:
        raise RuntimeError("not even that")


@two
@pytest.mark.parametrize(
    "error",
    [RuntimeError("of a framework"), errors.StateError("bad", found=threading.Lock()), Unshowable(), SystemExit(3)],
    ids=["foreign", "not to be pickled", "not to be shown", "not an Exception"],
)
def test_whatever_a_state_raises_on_one_rank_is_the_outcome_on_all_and_saving_goes_on(
    ckpt: Checkpointer, error: BaseException
) -> None:
    assert_goes_on(ckpt, 1)
    state = {**state_of(2), "o": Foreign(error if RANK == LAST else None)}
    if RANK == LAST:
        with pytest.raises(type(error)):
            ckpt.save(2, state)
    else:
        with pytest.raises(errors.SaveFailed, match=rf"rank {LAST} "):
            ckpt.save(2, state).wait()
    assert_goes_on(ckpt, 3)
    if RANK == LAST:
        with pytest.raises((errors.StateError, SystemExit)):
            ckpt.prepare(state)
    else:
        with pytest.raises(errors.StateError, match=rf"rank {LAST} "):
            ckpt.prepare(state)
    assert_goes_on(ckpt, 4)


@two
def test_what_fails_while_the_courier_copies_is_the_outcome_on_all_and_saving_goes_on(
    ckpt: Checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:  # such as of a dtype that torch cannot view
        if RANK == LAST:
            patch.setattr(stage.Staging, "copy", _fails)
        with pytest.raises(errors.SaveFailed, match=rf"could not be copied: TypeError.*\[rank {LAST} "):
            ckpt.save(1, state_of(1)).wait()
    assert_goes_on(ckpt, 2)


def _fails(*args: Any) -> None:
    raise TypeError("this cannot be viewed")


@two
def test_lower_steps_are_saved_after_a_failed_one_which_never_comes_back(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AI-Hypercomputer/maxtext#5260: a failed save stayed the latest, and later saves of lower steps were skipped."""
    options = {"job": "t", **on_node(root), "timeout_s": PATIENCE_S}
    with Checkpointer(**options) as ckpt:
        assert_goes_on(ckpt, 10)
        assert_goes_on(ckpt, 20)
        with monkeypatch.context() as patch:
            if RANK == LAST:
                patch.setattr(stage.Staging, "copy", _fails)
            with pytest.raises((TypeError, errors.SaveFailed), match="this cannot be viewed"):
                ckpt.save(30, state_of(30)).wait()
        state = state_of(0)
        assert ckpt.restore(state, before=30) == 20 and (state["x"] == state_of(20)["x"]).all()
        assert_goes_on(ckpt, 22)
        assert_goes_on(ckpt, 25)
    with Checkpointer(**options) as ckpt:
        assert 30 not in ckpt.steps() and ckpt.restore(state) == 25
        assert (state["x"] == state_of(25)["x"]).all()


@two
def test_a_callback_that_raises_costs_nothing(ckpt: Checkpointer) -> None:
    def call(snapshot: Any) -> None:
        raise SystemExit(1)

    snapshot = ckpt.save(1, state_of(1))
    snapshot.add_done_callback(call) if not snapshot.done else None
    assert_goes_on(ckpt, 2)


@two
def test_a_rank_that_fails_in_the_middle_is_named_at_once_and_not_after_the_deadline(
    ckpt: Checkpointer, fail_at: Callable[[str], Hold]
) -> None:
    assert_goes_on(ckpt, 1)
    if RANK == LAST:
        fail_at("protect.announced")
    start = time.monotonic()
    with pytest.raises(errors.SaveFailed, match=rf"rank {LAST}|ZeroDivisionError"):
        ckpt.save(2, state_of(2)).wait()
    assert time.monotonic() - start < PATIENCE_S / 3
    with pytest.raises(errors.SaveFailed, match="an earlier"):
        ckpt.save(3, state_of(3)).wait()


@two
def test_with_strict_no_rank_leaves_out_what_is_collective(root: Path) -> None:
    ckpt = Checkpointer(job="t", **on_node(root), timeout_s=PATIENCE_S, strict=True)
    assert_goes_on(ckpt, 1)
    if RANK == LAST:
        with pytest.raises(errors.StateError):
            ckpt.save(2, {"x": object()})
    else:
        with pytest.raises(errors.SaveFailed):  # by the save itself, where it has failed so soon
            ckpt.save(2, state_of(2))
            ckpt.wait()
    assert ckpt.steps() == [1]
    assert_goes_on(ckpt, 3)
    ckpt.close()


@two
@pytest.mark.parametrize("fails", [False, True], ids=["", "and fails with others"])
def test_a_rank_that_left_saves_out_falls_in_again(ckpt: Checkpointer, fails: bool) -> None:
    assert_goes_on(ckpt, 1)
    for step in (2, 3, 4, 5, 6, 7, 8):
        if RANK == LAST and step in (2, 4, 5):  # there an exception came before anything was posted
            continue
        if fails and RANK == LAST:
            with pytest.raises(errors.StateError):
                ckpt.save(step, {"x": object()})
        else:
            ckpt.save(step, state_of(step))
    ckpt.wait()
    assert_goes_on(ckpt, 9)
    assert_goes_on(ckpt, 10)


class _Interrupted(BaseException):
    pass


@two
def test_who_leaves_a_save_that_waits_for_its_slots_leaves_nothing_torn_on_any_rank(ckpt: Checkpointer) -> None:
    """A first save waits until the courier has copied: meanwhile a signal's handler raises on one rank."""
    here, left = threading.get_ident(), threading.Event()
    state = state_of(1)

    def at(point: str) -> None:
        if point == "stage.unsealed":
            signal.pthread_kill(here, signal.SIGUSR1)
            assert left.wait(PATIENCE_S)

    def handler(number: int, frame: object) -> None:
        raise _Interrupted

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        if RANK == LAST:
            crash_points.arm(at)
            with pytest.raises(_Interrupted):
                ckpt.save(1, state)
            state["x"][15_000:] = -1
        else:
            snapshot = ckpt.save(1, state)
        left.set()
        if RANK != LAST:
            with pytest.raises(errors.SaveFailed, match="interrupted the copy of the state"):
                snapshot.wait()
    finally:
        crash_points.arm(None)
        signal.signal(signal.SIGUSR1, before)
        left.set()
    assert_goes_on(ckpt, 2)
    assert ckpt.steps() == [2]


@two
def test_signals_at_any_time_stop_no_later_save(ckpt: Checkpointer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real signals from another thread of one rank, while it saves states that grow and states that do not."""
    # Python prints and drops what comes in the middle of a finalizer; pytest's own hook could be interrupted, too.
    monkeypatch.setattr(sys, "unraisablehook", collections.deque[object](maxlen=0).append)

    def handler(number: int, frame: object) -> None:
        if saving:
            raise _Interrupted

    saving, stop, here = False, threading.Event(), threading.get_ident()
    rng = np.random.default_rng(0)

    def disturb() -> None:
        while not stop.wait(float(rng.uniform(0.0005, 0.01))):
            signal.pthread_kill(here, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handler)
    disturber = threading.Thread(target=disturb)
    if RANK == LAST:
        disturber.start()
    interrupted = 0
    try:
        for step in range(1, 60):
            state = {"x": np.full(1000 + (step // 10) * 5000, 100 * step + RANK), "n": step}
            try:
                saving = True
                ckpt.save(step, state)
                saving = False
            except _Interrupted:
                saving = False
                interrupted += 1
            state["x"][:] = -1
    finally:
        stop.set()
        if RANK == LAST:
            disturber.join(PATIENCE_S)
        signal.signal(signal.SIGUSR1, before)
    assert interrupted or RANK != LAST
    for step in range(100, 104):  # a rank that left the last one out falls in
        ckpt.save(step, state_of(step))
    ckpt.wait()
    assert_goes_on(ckpt, 110)
