"""Nodes that lose their memory, and replicas that share what they hold, under DCP's own saves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp import Kept, spoil
from emulated import Nodes, on_node
from mpi4py import MPI
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch_jobs import job

from mlflash.adapters.dcp import latest
from mlflash.errors import Unrestorable

SIZE = MPI.COMM_WORLD.size


def state_of(seed: int, mesh: Any, *placements: Any) -> dict[str, Any]:
    whole = torch.arange(64.0 * 129).reshape(64, 129) * (seed + 0.1)
    tensors = {"w": whole, "b": whole[0] + 1, "half": (whole[:3] * 2).bfloat16()}
    cut = {name: distribute_tensor(tensor, mesh, placements, src_data_rank=None) for name, tensor in tensors.items()}
    return {"cut": cut, "step": torch.tensor(float(seed)), "epoch": seed}


@pytest.mark.parametrize(
    ("how", "lost"),
    [("sync", 0), pytest.param("sync", 1, marks=pytest.mark.gate), ("thread", 0), ("thread", 1), ("process", 1)],
)
def test_a_lost_node_costs_nothing_on_as_many_ranks_or_fewer(
    started: Callable[..., Any], nodes: Nodes, lost: int, how: str
) -> None:
    with job() as comm, started(comm) as running:
        mesh = init_device_mesh("cpu", (SIZE,))
        for step in (1, 2):
            state = state_of(step, mesh, Shard(0))
            done = running.save(state, step, how)
            spoil(state)
            done()
    nodes.keep()
    for size in (4, 2):
        nodes.bring_back(but=[lost])
        with job(size) as comm:
            if comm is None:
                continue
            with started(comm, **on_node(nodes.root, size // 2)) as running:
                mesh = init_device_mesh("cpu", (size,))
                Kept.of(state_of(2, mesh, Shard(0))).check(running.load(state_of(70, mesh, Shard(0))))
                running.save(state_of(3, mesh, Shard(0)), 3, "thread")()
                Kept.of(state_of(3, mesh, Replicate())).check(running.load(state_of(70, mesh, Replicate()), 3))


def test_where_all_copies_are_lost_the_recipe_goes_on_from_what_it_has_besides(
    started: Callable[..., Any], nodes: Nodes
) -> None:
    with job() as comm, started(comm) as running:
        running.save(state_of(1, init_device_mesh("cpu", (SIZE,)), Shard(0)), 1, "sync")()
    nodes.damage(1)
    with job() as comm, started(comm) as running:
        with pytest.raises(Unrestorable, match="step 1"):
            latest(running.ckpt)
        assert latest(running.ckpt, instead="/lustre/step-1") is None


@pytest.mark.parametrize("form", ["hdf5", "dcp"])
def test_with_all_memory_lost_the_directory_is_loaded_on_any_number_of_ranks(
    started: Callable[..., Any], nodes: Nodes, root: Path, form: str
) -> None:
    more = {"directory": root / "pfs", "format": form}
    with job() as comm, started(comm, drain_every=1, **more) as running:
        mesh = init_device_mesh("cpu", (SIZE,))
        for step in (1, 2):
            running.save(state_of(step, mesh, Shard(0)), step, "thread")()
            running.ckpt.wait_drained()

    nodes.lose(0, 1)
    for size in (4, 2):
        with job(size) as comm:
            if comm is not None:
                with started(comm, **on_node(nodes.root, size // 2), **more) as running:
                    mesh = init_device_mesh("cpu", (size,))
                    for step in (1, 2):
                        Kept.of(state_of(step, mesh, Replicate())).check(
                            running.load(state_of(70, mesh, Replicate()), step)
                        )
                    Kept.of(state_of(2, mesh, Shard(0))).check(running.load(state_of(70, mesh, Shard(0))))
                    found = state_of(70, mesh, Shard(0))
                    if form == "dcp":
                        reader = FileSystemReader(root / "pfs" / "step-00000002")
                        dcp.load(found, storage_reader=reader)
                        Kept.of(state_of(2, mesh, Shard(0))).check(found)


@pytest.mark.parametrize("lost", [None, 0, 1])
def test_replicas_on_other_nodes_share_what_they_hold(
    started: Callable[..., Any], nodes: Nodes, lost: int | None
) -> None:
    with job() as comm, started(comm) as running:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        state = state_of(0, mesh, Replicate(), Shard(0))
        running.writer.prepare(state)
        for step in (1, 2, 3):
            state = state_of(step, mesh, Replicate(), Shard(0))
            done = running.save(state, step, "thread")
            spoil(state)
            done()
            blank = state_of(70, mesh, Replicate(), Shard(0))
            Kept.of(state_of(step, mesh, Replicate(), Shard(0))).check(running.load(blank, step))
        report = running.ckpt.report()
        assert report["shared with"], "nothing is shared"
        assert report["counts"].get("tensors diverged", 0) == 0
    if lost is not None:
        nodes.lose(lost)
    with job() as comm, started(comm) as running:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        blank = state_of(70, mesh, Shard(0), Replicate())
        Kept.of(state_of(3, mesh, Shard(0), Replicate())).check(running.load(blank))
