"""Several threads per rank copy and check the same bits as one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from damage import flip
from mpi4py import MPI

from mlflash import Checkpointer
from mlflash.memory import copy_threads

pytestmark = pytest.mark.mpi
RANK = MPI.COMM_WORLD.rank


def state_of(step: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(100 * RANK + step)
    shapes = [(3_000_001,), (5, 7), (1024, 1500), (0,), (2_500_000,)]
    return {f"t{i}": torch.randn(shape) for i, shape in enumerate(shapes)}


def test_a_crew_saves_restores_and_finds_damage_as_one_thread_does(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_threads, "_measured", lambda ranks, agree: 3)  # of a courier that is a thread
    options |= {"redundancy": "none", "courier": "thread"}
    with Checkpointer(**options) as ckpt:
        for step in (1, 2):
            state = state_of(step)
            ckpt.save(step, state).wait()
            state["t0"].zero_()
        newest = next(slot for slot in ckpt.report()["slots"] if slot["step"] == 2)
        file = Path(ckpt.report()["memory"], newest["file"])
    with Checkpointer(**options) as ckpt:
        state = state_of(3)
        assert ckpt.restore(state) == 2
        assert all(map(torch.equal, state.values(), state_of(2).values()))
    for at in (13_000_000, 20_000_000):
        flip(file, at)
    with Checkpointer(**options) as ckpt:
        assert ckpt.restore(state) == 1
        assert all(map(torch.equal, state.values(), state_of(1).values()))
