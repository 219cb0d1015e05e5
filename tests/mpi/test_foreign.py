"""What is in the memory of one node and not ours: no rank stumbles over it alone, and it stays as it is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulated import Nodes
from mpi4py import MPI

from mlflash import Checkpointer

pytestmark = pytest.mark.mpi
RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


def state_of(step: int) -> dict[str, Any]:
    return {"a": np.arange(50_000) * (step + RANK)}


def plant(node: Path, kind: str) -> dict[str, tuple[int, int, int]]:
    """Put foreign files where slots and heartbeats are looked for; returns what they are like."""
    target = node.parent / "target"
    target.write_bytes(b"x" * 8192)
    planted = [node / name for name in ("slot-0090", "slot-0100", "pulse-0077")]
    for path in planted:
        if kind == "link":
            path.symlink_to(target)
        elif kind == "directory":
            path.mkdir()
        else:
            path.write_bytes(b"x" * 8192)
            path.chmod(0o644)
    return {str(path): (path.lstat().st_ino, path.lstat().st_mode, path.lstat().st_size) for path in planted}


@pytest.mark.parametrize("kind", ["link", "directory", "open"])
def test_foreign_files_on_one_node_are_passed_over_by_all_ranks_alike(
    options: dict[str, Any], nodes: Nodes, kind: str
) -> None:
    with Checkpointer(**options) as ckpt:
        ckpt.save(1, state_of(1)).wait()
    planted: dict[str, tuple[int, int, int]] = {}
    nodes.on_rank_0(lambda: planted.update(plant(nodes.path(0), kind)))
    with Checkpointer(**options) as ckpt:
        state = state_of(0)
        assert ckpt.restore(state) == 1 and np.array_equal(state["a"], state_of(1)["a"])
        assert ckpt.save(2, state_of(2)).wait().committed
        assert ckpt.save(3, {"a": np.arange(200_000)}).wait().committed  # with new files
        assert ckpt.steps() == [2, 3]
    for path, (inode, mode, nbytes) in planted.items():
        now = os.lstat(path)
        assert (now.st_ino, now.st_mode, now.st_size) == (inode, mode, nbytes)


@pytest.mark.mpi(min_size=2)
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
