"""What goes wrong on one rank while a state is filled: all ranks put it back, or none saves it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from torch_jobs import job

from mlflash import Checkpointer, errors
from mlflash.restore import load

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


@pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "not kept"])
@pytest.mark.parametrize("ranks", [SIZE, SIZE - 1], ids=["the same ranks", "one rank less"])
def test_what_fails_on_one_rank_is_put_back_on_all_or_saved_on_none(
    options: dict[str, Any], ranks: int, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_kept:
        monkeypatch.setattr(load, "_KEPT_NBYTES", 0)
    with Checkpointer(comm=COMM, strict=True, **options) as ckpt:
        ckpt.save(1, state_of(1.0)).wait()
    with job(ranks) as comm:
        if comm is not None:
            with Checkpointer(comm=comm, strict=True, **options) as ckpt:
                state = state_of(2.0, fails=(ranks - 1 if is_kept else 0) == RANK)
                with pytest.raises(errors.StructureMismatch, match=r"loading failed: OSError: no") as caught:
                    ckpt.restore(state)
                if is_kept:
                    assert is_all(state, 2.0) and "undefined" not in str(caught.value)
                else:
                    assert "the state that you gave is now undefined: restore again" in str(caught.value)
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
        with pytest.raises(errors.StructureMismatch, match="now undefined"):
            ckpt.restore(state_here(2.0, fails=RANK == 0))
        state = state_here(2.0)
        assert ckpt.restore(state) == 1 and is_all(state, 1.0)
        assert RANK or (state["own"].value == 1.0).all()


def test_what_an_adapter_loads_on_one_rank_only_is_saved_on_none(options: dict[str, Any]) -> None:
    def load(fails: bool) -> int:
        if fails:
            raise OSError("no")
        return 7

    with Checkpointer(comm=COMM, strict=True, **options) as ckpt:
        together = ckpt.adapting.load_together
        ckpt.save(1, {"w": np.ones(7)}).wait()
        with pytest.raises(errors.StructureMismatch, match=r"loading failed: OSError: no") as caught:
            together(1, lambda: load(RANK == SIZE - 1), anew=True)
        assert caught.value.rank == SIZE - 1 and "undefined" not in str(caught.value)
        ckpt.save(2, {"w": np.ones(7)}).wait()
        with pytest.raises(errors.StructureMismatch, match="the state that you gave is now undefined: restore again"):
            together(2, lambda: load(RANK == SIZE - 1))
        with pytest.raises(errors.StateError, match="the state is undefined"):
            ckpt.save(3, {"w": np.ones(7)})
        assert together(2, lambda: load(False), anew=True) == 7
        with pytest.raises(errors.StateError, match="the state is undefined"):
            ckpt.save(4, {"w": np.ones(7)})
        assert together(2, lambda: load(False)) == 7
        ckpt.save(5, {"w": np.ones(7)}).wait()


def test_what_is_read_in_part_is_saved_on_no_rank(options: dict[str, Any]) -> None:
    def fail() -> list[Any]:
        if RANK == 0:
            raise OSError("no")
        return []

    with Checkpointer(comm=COMM, strict=True, **options) as ckpt:

        def read(wanted: Any, done: Any, **more: bool) -> str:
            opened = ckpt.adapting.open()
            assert opened is not None
            with pytest.raises(errors.StructureMismatch, match=r"loading failed: OSError: no") as caught:
                ckpt.adapting.read(opened, wanted, done, **more)
            return str(caught.value)

        ckpt.save(1, {"w": np.ones(7)}).wait()
        assert "undefined" not in read(fail, lambda: None), "nothing was changed"
        assert "undefined" not in read(list, fail, anew=True)
        ckpt.save(2, {"w": np.ones(7)}).wait()
        assert "now undefined" in read(list, fail)
        with pytest.raises(errors.StateError, match="the state is undefined"):
            ckpt.save(3, {"w": np.ones(7)})
        opened = ckpt.adapting.open()
        assert opened is not None
        ckpt.adapting.read(opened, list, lambda: None)
        ckpt.save(4, {"w": np.ones(7)}).wait()
