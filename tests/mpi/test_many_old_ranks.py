"""A checkpoint of 1,000 ranks goes on on two, which open the files that they need, and ask each few times."""

from __future__ import annotations

import collections
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from many_old_ranks import ALIKE, LEAVES, RANKS, SHARDS, STEP, whole, write
from mpi4py import MPI
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch_jobs import job

from mlflash import Checkpointer
from mlflash.draining.checkpoint_directory import list_checkpoints
from mlflash.storage.store import Directory

COMM = MPI.COMM_WORLD
RANK = COMM.rank

pytestmark = [pytest.mark.skipif(COMM.size != 2, reason="runs on 2 ranks"),
              pytest.mark.filterwarnings("ignore:.*barrier.*:UserWarning")]  # fmt: skip


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> collections.Counter[str]:
    """How often each file was asked for something, by this process."""
    found: collections.Counter[str] = collections.Counter()
    for verb in ("read", "nbytes", "open"):
        of_store = getattr(Directory, verb)

        def count(self: Directory, name: str, *args: Any, of_store: Any = of_store, **named: Any) -> Any:
            found[name] += 1
            return of_store(self, name, *args, **named)

        monkeypatch.setattr(Directory, verb, count)
    return found


def test_a_checkpoint_of_a_thousand_ranks_is_restored_on_two(root: Path, asked: collections.Counter[str]) -> None:
    assert (RANKS, LEAVES) == (1000, 3000)
    if RANK == 0:
        write(root / "pfs" / f"step-{STEP:08d}")
    COMM.Barrier()
    (listed,) = list_checkpoints(Directory(str(root / "pfs")))
    assert listed.card.index_nbytes < 1_000_000, "what all ranks hold is a kilobyte for each of them"
    with job() as comm:
        assert comm is not None
        mesh = init_device_mesh("cpu", (2,))
        tensors = {f"l{leaf}": torch.from_numpy(whole(leaf)) for leaf in range(LEAVES - 1)}
        zeros = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        model = {
            name: zero if len(zero) == 1 else distribute_tensor(zero, mesh, [Shard(0)]) for name, zero in zeros.items()
        }
        state: dict[str, Any] = {"model": model, "own": torch.tensor([-1]), "epoch": -1, "of rank": -1}
        asked.clear()
        options: dict[str, Any] = {
            "memory": str(root),
            "directory": root / "pfs",
            "ranks_per_node": 1,
            "timeout_s": 60.0,
        }
        with Checkpointer(comm=comm, job="t", **options) as ckpt:
            assert ckpt.restore(state) == STEP
        mine = slice(SHARDS // 2 * RANK, SHARDS // 2 * (RANK + 1))
        assert dist.get_rank() == RANK
        for name, tensor in tensors.items():
            found = state["model"][name]
            assert torch.equal(found, tensor) if tensor.shape[0] == 1 else torch.equal(found.to_local(), tensor[mine])
        assert (state["own"].tolist(), state["epoch"], state["of rank"]) == ([RANK], 50, RANK)
    files = {
        int(found[0]) for name in asked if (found := re.search(r"\d+", name)) and not name.startswith("checkpoint")
    }
    # Of each shard that it needs one replica, whoever has a part of what all hold alike, and the rank of its number.
    assert {*range(mine.start, mine.stop), RANK} <= files and len(files) <= SHARDS // 2 + ALIKE + 1 < RANKS // 8
    assert max(asked.values()) <= 5 and asked.total() <= 6 * len(files), asked
