"""What others do to the memory of nodes while it is ours: they put files in the place of slots, or empty it.

systemd empties it at the end of a user's last session, with RemoveIPC.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulated import Nodes
from holds import Hold
from mpi4py import MPI
from waiting import until

from mlflash import Checkpointer, errors

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.filterwarnings("ignore:.*was not saved.*")]
RANK = MPI.COMM_WORLD.rank


def state_of(step: int) -> dict[str, Any]:
    return {"a": np.random.default_rng((RANK, step)).standard_normal(50_000 + RANK)}


@pytest.mark.parametrize("kind", ["link", "directory", "open"])
def test_where_a_slot_of_one_node_became_foreign_its_copy_is_restored(
    options: dict[str, Any], nodes: Nodes, kind: str
) -> None:
    with Checkpointer(**options) as ckpt:
        ckpt.save(1, state_of(1)).wait()

    def spoil() -> None:
        for path, header in nodes.files(0):
            if header.rank == 0:
                path.rename(path.parent / "moved") if kind != "open" else path.chmod(0o644)
                if kind == "link":
                    path.symlink_to("moved")
                elif kind == "directory":
                    path.mkdir()

    nodes.on_rank_0(spoil)
    with Checkpointer(**options) as ckpt:
        state = state_of(0)
        assert ckpt.restore(state) == 1 and np.array_equal(state["a"], state_of(1)["a"])
        assert ckpt.save(2, state_of(2)).wait().committed


# Somebody empties it


def remove_directories(root: Path) -> None:
    for path in root.glob("node*/mlflash-*"):
        shutil.rmtree(path)


def remove_files(root: Path) -> None:
    for path in filter(Path.is_file, [*root.rglob("*")]):
        path.unlink()


@pytest.mark.parametrize("redundancy", ["copy", "none"])
@pytest.mark.parametrize("remove", [remove_directories, remove_files])
def test_what_is_saved_afterward_is_really_there(
    options: dict[str, Any], nodes: Nodes, remove: Callable[[Path], None], redundancy: str
) -> None:
    options["redundancy"] = redundancy
    with Checkpointer(**options) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_of(step)).wait()
        nodes.on_rank_0(lambda: remove(nodes.root))
        for step in (3, 4, 5):
            assert ckpt.save(step, state_of(step)).wait().committed
        state = state_of(0)
        assert ckpt.restore(state) == 5 and np.array_equal(state["a"], state_of(5)["a"])
    with Checkpointer(**options) as ckpt:
        state = state_of(0)
        assert ckpt.restore(state) == 5 and np.array_equal(state["a"], state_of(5)["a"])
        assert sorted(ckpt.steps()) == [4, 5]


def test_a_save_whose_files_are_removed_meanwhile_fails_and_the_next_one_does_not(
    options: dict[str, Any], nodes: Nodes, hold_at: Callable[[str], Hold]
) -> None:
    with Checkpointer(**options) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_of(step)).wait()
        held = hold_at("protect.sealed")
        snapshot = ckpt.save(3, state_of(3))
        until(lambda: held.is_reached, "the save to have sealed its slot")
        nodes.on_rank_0(lambda: remove_directories(nodes.root))
        held.set()
        with pytest.raises(errors.SaveFailed, match=r"somebody has removed slot-\d+"):
            snapshot.wait()
        assert ckpt.save(4, state_of(4)).wait().committed
    with Checkpointer(**options) as ckpt:
        assert ckpt.restore(state_of(0)) == 4


def test_a_job_whose_lock_was_removed_holds_the_new_one(options: dict[str, Any], nodes: Nodes) -> None:
    with Checkpointer(**options) as ckpt:
        ckpt.save(1, state_of(1)).wait()
        nodes.on_rank_0(lambda: remove_directories(nodes.root))
        ckpt.save(2, state_of(2)).wait()
        with pytest.raises(errors.JobInUse):
            Checkpointer(**options)
