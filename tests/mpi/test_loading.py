"""What goes wrong on one rank while a state is filled: all ranks put it back, or none saves it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from torch_jobs import job

from mlflash import Checkpointer, errors, loading

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size

pytestmark = pytest.mark.mpi(min_size=2)


class Keeper:
    """An object whose load fails on one rank, once."""

    def __init__(self, value: float, fails: bool = False):
        self.value, self.fails = np.full(100, value), fails

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value[:50] = state["value"][:50]
        if self.fails:
            self.fails = False
            raise OSError("no")
        self.value[50:] = state["value"][50:]


def state_of(value: float, fails: bool = False) -> dict[str, Any]:
    return {"first": Keeper(value), "second": Keeper(value, fails), "array": np.full(7, value), "plain": value}


def is_all(state: dict[str, Any], value: float) -> bool:
    objects = [state["first"].value, state["second"].value, state["array"]]
    return all((array == value).all() for array in objects) and state["plain"] == value


@pytest.mark.parametrize("ranks", [SIZE, SIZE - 1], ids=["the same ranks", "one rank less"])
def test_what_fails_on_one_rank_is_put_back_on_all(options: dict[str, Any], ranks: int) -> None:
    with Checkpointer(comm=COMM, strict=True, **options) as ckpt:
        ckpt.save(1, state_of(1.0)).wait()
    with job(ranks) as comm:
        if comm is not None:
            with Checkpointer(comm=comm, strict=True, **options) as ckpt:
                state = state_of(2.0, fails=ranks - 1 == RANK)
                with pytest.raises(errors.StructureMismatch, match=r"loading failed: OSError.'no'") as caught:
                    ckpt.restore(state)
                assert is_all(state, 2.0) and "undefined" not in str(caught.value)
                assert ckpt.restore(state) == 1 and is_all(state, 1.0)
                ckpt.save(2, state).wait()


@pytest.mark.parametrize("ranks", [SIZE, SIZE - 1], ids=["the same ranks", "one rank less"])
def test_what_cannot_be_put_back_on_one_rank_is_saved_on_none(
    options: dict[str, Any], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "_KEPT_NBYTES", 0)
    with Checkpointer(comm=COMM, strict=True, **options) as ckpt:
        ckpt.save(1, state_of(1.0)).wait()
    with job(ranks) as comm:
        if comm is not None:
            with Checkpointer(comm=comm, strict=True, **options) as ckpt:
                state = state_of(2.0, fails=RANK == 0)
                with pytest.raises(errors.StructureMismatch, match="the state given is undefined now: restore again"):
                    ckpt.restore(state)
                with pytest.raises(errors.StateError, match="the state is undefined"):
                    ckpt.save(2, state)
                assert ckpt.steps() == [1]
                assert ckpt.restore(state) == 1 and is_all(state, 1.0)
                ckpt.save(3, state).wait()


def test_ranks_with_objects_of_their_own_load_them_all_the_same(options: dict[str, Any]) -> None:
    def state_here(value: float, fails: bool = False) -> dict[str, Any]:
        return state_of(value, fails) | ({"own": Keeper(value)} if RANK == 0 else {})

    with Checkpointer(comm=COMM, strict=True, **options) as ckpt:
        ckpt.save(1, state_here(1.0)).wait()
        with pytest.raises(errors.StructureMismatch, match="undefined now"):
            ckpt.restore(state_here(2.0, fails=RANK == 0))
        state = state_here(2.0)
        assert ckpt.restore(state) == 1 and is_all(state, 1.0)
        assert RANK or (state["own"].value == 1.0).all()
