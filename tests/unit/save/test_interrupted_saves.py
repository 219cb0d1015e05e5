"""An exception at any moment of a save, as a signal handler raises it, in one process without MPI."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from interruption import Interrupted, uncollected
from waiting import PATIENCE_S

import mlflash
from mlflash import Checkpointer

_HOME = str(Path(mlflash.__file__).parent)
_EVERY = 7  # lines of a save from one at which it is interrupted to the next


class InterruptAt:
    """Raises in this thread when so many lines of mlflash have begun; as a signal's handler may, between any two.

    Attributes:
        lines: that have begun.
    """

    def __init__(self, line: int):
        self.lines, self._line = 0, line
        self._uncollected = uncollected()

    def __enter__(self) -> InterruptAt:
        self._uncollected.__enter__()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)
        self._uncollected.__exit__(None, None, None)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_HOME):
            return self._trace if frame.f_code.co_name == "<module>" else None
        if event == "line" and not _leaves_with(frame):
            self.lines += 1
            if self.lines == self._line:
                raise Interrupted
        return self._trace


def _leaves_with(frame: FrameType) -> bool:
    """Whether a ``with`` may end here: Python looks for signals in its block, and not again before its end."""
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with ")


@pytest.fixture
def ckpt(shm: Path) -> Iterator[Checkpointer]:
    with Checkpointer(memory=str(shm), job="j", redundancy="none", timeout_s=PATIENCE_S) as ckpt:
        yield ckpt


def check(ckpt: Checkpointer, state_of: Callable[[int], dict[str, Any]], line: int) -> int | None:
    """Compare all that is committed with what was to be saved; returns the newest step."""
    for step in ckpt.steps():
        assert ckpt.load(step)[1]["x"].tolist() == state_of(step)["x"].tolist(), (line, step)
    return max(ckpt.steps(), default=None)


def interrupt_all(ckpt: Checkpointer, state_of: Callable[[int], dict[str, Any]]) -> int:
    """Interrupt saves at line after line until one is through; all that was committed must be whole."""
    step, line, committed = 1, 1, 0
    ckpt.save(step, state_of(step)).wait()
    while True:
        step += 1
        state = state_of(step)
        try:
            with InterruptAt(line) as interrupt:
                ckpt.save(step, state)
        except Interrupted:
            pass
        through = interrupt.lines < line
        state["x"][:] = -1  # whoever left the save may change the state at once
        ckpt.wait()
        committed += check(ckpt, state_of, line) == step and not through
        step += 1
        ckpt.save(step, state_of(step)).wait()  # nothing stops the next one
        assert check(ckpt, state_of, line) == step
        if through:
            return committed
        line += _EVERY


def test_an_exception_at_any_line_of_a_save_commits_nothing_torn_and_stops_no_later_save(ckpt: Checkpointer) -> None:
    assert interrupt_all(ckpt, lambda step: {"x": np.full(1000, step), "n": step}) > 0


@pytest.mark.slow
def test_so_it_is_where_the_save_waits_for_larger_slots(ckpt: Checkpointer) -> None:
    assert interrupt_all(ckpt, lambda step: {"x": np.full(1000 + 3000 * step, step), "n": step}) > 0
