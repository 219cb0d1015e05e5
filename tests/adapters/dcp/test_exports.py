"""What ``dcp.save`` has put into memory, in files that others read: tensors whole, the state as nested as it was."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from dcp import DropPlanner, Kept, RenamePlanner
from emulated import Nodes
from mpi4py import MPI
from torch.distributed._shard import sharded_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch_jobs import job

from .test_reshard import SPECS

COMM = MPI.COMM_WORLD

WHOLE = torch.arange(200.0).reshape(10, 20) * 1.25
TIED = torch.arange(12.0).reshape(3, 4)
OBJECTS = {"lr": 0.1, "betas": (0.9, 0.999), "name": "run", "epoch": 7, "none": None}


def table() -> Any:
    """Several parts of it are on one rank, and none on another."""
    made = sharded_tensor.zeros(SPECS[-1], 10, 20, init_rrefs=False)
    for shard in made.local_shards():
        (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
        shard.tensor.copy_(WHOLE[row : row + rows, column : column + columns])
    return made


def state() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (4,))
    cut = {str(n): distribute_tensor(WHOLE * n, mesh, [how], src_data_rank=None)
           for n, how in enumerate((Shard(0), Shard(1), Replicate()))}  # fmt: skip
    return {"model": {"table": table(), **cut, "half": WHOLE[0].bfloat16()}, "tied": [TIED, {"again": TIED}],
            "optimizer": {"groups": [OBJECTS, {"lr": 0.2, "steps": torch.tensor(3)}]},
            "buffer": torch.tensor(1.0)}  # fmt: skip


def whole() -> dict[str, Any]:
    """The same, as one process sees it."""
    model = {"table": WHOLE, **{str(n): WHOLE * n for n in range(3)}, "half": WHOLE[0].bfloat16()}
    return {"model": model, "tied": [TIED, {"again": TIED}],
            "optimizer": {"groups": [OBJECTS, {"lr": 0.2, "steps": torch.tensor(3)}]},
            "buffer": torch.tensor(1.0)}  # fmt: skip


def blank(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, 77)
    if isinstance(value, dict):
        return {key: blank(sub) for key, sub in value.items()}
    return [blank(sub) for sub in value] if isinstance(value, list) else None


def export(form: str, out: Path, *options: object) -> None:
    """Run the command in a process of its own, which is no rank of this job."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI", "HYDI", "MPI_"))}
    command = [sys.executable, "-W", "error", "-m", "mlflash", "export", "newest", out, "--to", form, *options]
    done = subprocess.run([str(word) for word in command], env=environment, timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "left out" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("form", "planner"), [("hdf5", None), ("dcp", None), ("dcp", RenamePlanner), ("dcp", DropPlanner)]
)
def test_what_dcp_saved_is_drained_and_exported_whole(
    started: Callable[..., Any], nodes: Nodes, root: Path, form: str, planner: Any
) -> None:
    pfs = root / "pfs"
    with job() as comm, started(comm, directory=pfs, format=form, drain_every=1) as running:
        running.save(state(), 12, "thread", planner and planner())()
        running.ckpt.wait_drained()
    COMM.Barrier()
    if COMM.rank == 0:
        folder = pfs / "step-00000012"
        wanted = {"ema": whole()} if planner is RenamePlanner else whole()
        if planner is DropPlanner:
            del wanted["buffer"]
        if form == "hdf5":
            with h5py.File(folder / "checkpoint.h5") as file:
                for name, tensor in {
                    "model.table": WHOLE,
                    "model.1": WHOLE,
                    "tied.0": TIED,
                    "tied.1.again": TIED,
                }.items():
                    assert np.array_equal(file["tensors"][name][()], tensor.numpy()), name
                assert '"optimizer.groups.0.lr": 0.1' in file["objects"][()].decode()
        else:
            found = blank(wanted)
            torch_dcp.load(found, checkpoint_id=folder, no_dist=True)
            Kept.of(wanted).check(found)
        where = ["--directory", pfs, "--job", "t", "--memory", root]
        export("torch", root / "torch", *where)
        Kept.of(wanted).check(torch.load(root / "torch" / "state.pt"))
        export("dcp", root / "again", *where)
        found = blank(wanted)
        torch_dcp.load(found, checkpoint_id=root / "again", no_dist=True)
        Kept.of(wanted).check(found)
    COMM.Barrier()
