"""Cases for PyTorch's own harness, which spawns their ranks: ``pytorch_cases.py CLASS.METHOD``.

Ranks have no launcher and no variables of one: they meet by the file that the harness gives to init_process_group.
"""

from __future__ import annotations

import os
import signal
import unittest

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from digests import digests
from on_node import settings_of
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorTestBase, with_comms

from mlflash import Checkpointer
from mlflash.adapters.dcp import MemoryReader, MemoryWriter, latest


class Case(DTensorTestBase):
    device_type = "cpu"

    @property
    def backend(self) -> str:
        return "gloo"

    def open(self, job: str) -> Checkpointer:
        """A Checkpointer: nothing but torch.distributed says anything of its ranks."""
        return Checkpointer(job=job, timeout_s=60, **settings_of(dist.get_rank(), os.environ["MLFLASH_MEMORY"]))

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """One step of a training; all ranks have the same data, which every kind of parallelism may have."""
        model(torch.arange(64.0).reshape(4, 16) / 64).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def goes_on(self, job: str, model: nn.Module, again: nn.Module, is_async: bool = False) -> None:
        """Train and save, load into a model that was made anew, and compare both and the step after it."""
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        self.step(model, optimizer)
        with self.open(job) as ckpt:
            writer, reader = MemoryWriter(ckpt), MemoryReader(ckpt)
            weights, moments = get_state_dict(model, optimizer)
            saved = {"model": weights, "optimizer": moments}
            if is_async:
                planning = dist.new_group(backend="gloo")
                dcp.async_save(saved, checkpoint_id="step-1", storage_writer=writer, process_group=planning).result()
            else:
                dcp.save(saved, checkpoint_id="step-1", storage_writer=writer)
            other = torch.optim.AdamW(again.parameters(), lr=0.01)
            weights, moments = get_state_dict(again, other)
            state = {"model": weights, "optimizer": moments}
            dcp.load(state, checkpoint_id=latest(ckpt), storage_reader=reader)
            set_state_dict(again, other, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        for training in ((model, optimizer), (again, other)):
            self.step(*training)
        self.assertEqual(digests(get_state_dict(model, optimizer)), digests(get_state_dict(again, other)))


class TwoRanks(Case):
    world_size = 2  # type: ignore[assignment]

    @with_comms
    def test_fsdp2(self) -> None:
        self.goes_on("fsdp2", fully_shard(self.model()), fully_shard(self.model()))
        self.goes_on("behind", fully_shard(self.model()), fully_shard(self.model()), is_async=True)

    @with_comms
    def test_killed(self) -> None:
        """The first run saves and is killed, every rank; the second finds it."""
        mesh = init_device_mesh("cpu", (2,))
        whole = torch.arange(1000.0)
        state = {"a": distribute_tensor(torch.zeros(1000), mesh, [Shard(0)]), "n": 0}
        ckpt = self.open("killed")
        if (newest := latest(ckpt)) is None:
            state = {"a": distribute_tensor(whole, mesh, [Shard(0)]), "n": 9}
            dcp.save(state, checkpoint_id="step-9", storage_writer=MemoryWriter(ckpt))
            os.kill(os.getpid(), signal.SIGKILL)
        dcp.load(state, checkpoint_id=newest, storage_reader=MemoryReader(ckpt))
        self.assertTrue(torch.equal(state["a"].full_tensor(), whole))  # type: ignore[attr-defined]
        self.assertEqual((newest, state["n"]), ("step-00000009", 9))
        ckpt.close()


class FourRanks(Case):
    world_size = 4  # type: ignore[assignment]

    @with_comms
    def test_hsdp_and_tensor_parallel(self) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        self.goes_on("hsdp", fully_shard(self.model(), mesh=mesh), fully_shard(self.model(), mesh=mesh))
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))

        def made() -> nn.Module:
            model = parallelize_module(self.model(), both["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
            return fully_shard(model, mesh=both["data"])

        self.goes_on("parallel", made(), made())


if __name__ == "__main__":
    unittest.main()
