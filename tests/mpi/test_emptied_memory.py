"""Somebody empties node memory while a job runs, as systemd does with RemoveIPC at the end of a user's last session."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mlflash import Checkpointer, crash_points, errors

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.filterwarnings("ignore:.*was not saved.*")]
COMM = MPI.COMM_WORLD
RANK = COMM.rank


def state_at(step: int) -> dict[str, Any]:
    return {"w": np.random.default_rng((RANK, step)).standard_normal(50_000 + RANK), "step": step}


def emptied(root: Path, what: str) -> None:
    """Remove all directories, or only the files in them, in one place for all ranks."""
    COMM.Barrier()
    if RANK == 0:
        for path in root.glob("node*/mlflash-*") if what == "directories" else root.rglob("*"):
            if what == "directories":
                shutil.rmtree(path)
            elif path.is_file():
                path.unlink()
    COMM.Barrier()


@pytest.mark.parametrize("redundancy", ["copy", "none"])
@pytest.mark.parametrize("what", ["directories", "files"])
def test_what_is_saved_afterward_is_really_there(
    options: dict[str, Any], root: Path, what: str, redundancy: str
) -> None:
    options["redundancy"] = redundancy
    with Checkpointer(**options) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_at(step)).wait()
        emptied(root, what)
        for step in (3, 4, 5):
            assert ckpt.save(step, state_at(step)).wait().committed
        state = state_at(0)
        assert ckpt.restore(state) == 5 and np.array_equal(state["w"], state_at(5)["w"])
    with Checkpointer(**options) as ckpt:
        state = state_at(0)
        assert ckpt.restore(state) == 5 and np.array_equal(state["w"], state_at(5)["w"])
        assert sorted(ckpt.steps()) == [4, 5]


@pytest.mark.in_thread
def test_a_save_whose_files_are_removed_meanwhile_fails_and_the_next_one_does_not(
    options: dict[str, Any], root: Path
) -> None:
    def remove(point: str) -> None:
        if point == "protect.sealed" and RANK == 0:
            for path in root.glob("node*/mlflash-*"):
                shutil.rmtree(path)

    with Checkpointer(**options) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_at(step)).wait()
        crash_points.arm(remove)
        try:
            with pytest.raises(errors.SaveFailed, match=r"somebody has removed slot-\d+"):
                ckpt.save(3, state_at(3)).wait()
        finally:
            crash_points.arm(None)
        assert ckpt.save(4, state_at(4)).wait().committed
    with Checkpointer(**options) as ckpt:
        assert ckpt.restore(state_at(0)) == 4


def test_a_job_whose_lock_was_removed_holds_the_new_one(options: dict[str, Any], root: Path) -> None:
    with Checkpointer(**options) as ckpt:
        ckpt.save(1, state_at(1)).wait()
        emptied(root, "directories")
        ckpt.save(2, state_at(2)).wait()
        with pytest.raises(errors.JobInUse):
            Checkpointer(**options)
