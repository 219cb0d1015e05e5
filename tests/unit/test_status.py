"""What `mlflash status` says of a job that saves while it is looked at."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from mlflash.commands import status
from mlflash.mpi.world import World
from mlflash.placement.node import this_node


@pytest.mark.parametrize(
    ("pid", "lost", "looks", "is_well"),
    [
        (7, [78, None], 2, True),
        (7, [78, 79, None], 3, True),
        (7, [78, 79, 80, 81, 82], 5, True),  # it commits faster than it can be looked at
        (7, [78, 78], 2, False),
        (7, [78, 79, 79], 3, False),
        (None, [78], 1, False),
        (7, [None], 1, True),
    ],
)
def test_a_step_of_a_live_job_is_lost_only_if_two_looks_find_it_so(
    pid: int | None, lost: Sequence[int | None], looks: int, is_well: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = itertools.count()

    def prospect(generation: int) -> Any:
        return SimpleNamespace(attempt=SimpleNamespace(generation=generation))

    outlooks = (SimpleNamespace(lost=None if one is None else prospect(one), unseen=(), newest=prospect(0))
                for one in lost)  # fmt: skip
    before: dict[Any, Any] = {}

    def restorable(*_: Any) -> Any:
        next(count)
        made = next(outlooks)
        if made.lost is not None:  # equal attempts are equal
            made.lost.attempt = before.setdefault(made.lost.attempt.generation, made.lost.attempt)
        return made

    monkeypatch.setattr(status.choose_job, "choose", lambda *_: "j")
    monkeypatch.setattr(status, "look_around", lambda *_: [SimpleNamespace(pid=pid, damaged=[])])
    monkeypatch.setattr(status, "what_is_restorable", restorable)
    monkeypatch.setattr(status.on_disk, "look_into", lambda *_: None)
    found = status.look(World(None, this_node(), math.inf), SimpleNamespace(memory="", directory=None), None)  # type: ignore[arg-type]
    assert (found.is_well, next(count)) == (is_well, looks)
