"""A collective that failed does not keep what waited for it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch")


class Trainer:
    """Stands for what an interrupted step has in its frames."""


class Failed:
    """A collective of gloo that has failed."""

    def is_completed(self) -> bool:
        return False

    def get_future(self) -> Any:
        future = torch.futures.Future()
        future.set_exception(RuntimeError("connection reset"))
        return future


def test_an_error_that_a_collective_keeps_does_not_keep_the_frames_that_waited() -> None:
    from mlflash.adapters.kept_groups import InterruptibleWork

    work = InterruptibleWork(Failed())

    def step() -> weakref.ref[Trainer]:
        trainer = Trainer()
        with pytest.raises(RuntimeError, match="connection reset"):
            work.wait()
        return weakref.ref(trainer)

    trainer = step()
    gc.collect()
    assert trainer() is None and work.is_completed()
