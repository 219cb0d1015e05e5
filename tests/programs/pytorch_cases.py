"""Cases for PyTorch's own harness, which spawns their ranks: ``pytorch_cases.py CLASS.METHOD``.

Ranks have no launcher and no variables of one: they meet by the file that the harness gives to init_process_group.
"""

from __future__ import annotations

import os
import signal
import unittest
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorTestBase, with_comms

from mlflash import Checkpointer
from mlflash.adapters.dcp import MemoryReader, MemoryWriter, latest


class Halves(DefaultSavePlanner):
    """Saves tensors in half precision."""

    def set_up_planner(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        super().set_up_planner({name: value.half() for name, value in state_dict.items()}, *args, **kwargs)


class Renames(DefaultLoadPlanner):
    """Loads as "lines" what was saved as "rows"."""

    def set_up_planner(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        super().set_up_planner({"rows": state_dict["lines"]}, *args, **kwargs)


class Case(DTensorTestBase):
    device_type = "cpu"

    @property
    def backend(self) -> str:
        return "gloo"

    def open(self, job: str) -> Checkpointer:
        """A Checkpointer: nothing but torch.distributed says anything of its ranks."""
        return Checkpointer(job=job, ranks_per_node=1, timeout_s=60)

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))

    def step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """One step of a training; all ranks have the same data, which every kind of parallelism may have."""
        model(torch.arange(64.0).reshape(4, 16) / 64).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def same(self, one: Any, other: Any) -> None:
        """Compare what two states hold, bit for bit, and how tensors are placed."""
        self.assertEqual(type(one), type(other))
        if isinstance(one, dict):
            self.assertEqual(one.keys(), other.keys())
            for key in one:
                self.same(one[key], other[key])
        elif isinstance(one, DTensor):
            self.assertEqual(one.placements, other.placements)
            self.assertTrue(torch.equal(one.to_local(), other.to_local()))
        elif isinstance(one, torch.Tensor):
            self.assertTrue(torch.equal(one, other))
        else:
            self.assertEqual(one, other)

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
        self.same(get_state_dict(model, optimizer)[0], get_state_dict(again, other)[0])


class TwoRanks(Case):
    world_size = 2  # type: ignore[assignment]

    @with_comms
    def test_fsdp2_and_a_state_of_everything(self) -> None:
        self.goes_on("fsdp2", fully_shard(self.model()), fully_shard(self.model()))
        self.goes_on("behind", fully_shard(self.model()), fully_shard(self.model()), is_async=True)
        self.everything()
        self.whole_states()
        self.parts()
        self.planners()

    def everything(self) -> None:
        """All that a state may hold, and DTensors that are placed otherwise when they are loaded."""
        mesh = init_device_mesh("cpu", (2,))
        whole = torch.arange(35.0).reshape(7, 5)
        state = {
            "rows": distribute_tensor(whole, mesh, [Shard(0)]),
            "columns": distribute_tensor(whole + 1, mesh, [Shard(1)]),
            "all": distribute_tensor(whole + 2, mesh, [Replicate()]), "plain": torch.full((3,), 7.0),
            "nested": {"n": 5, "text": "five", "list": [1, 2.5, torch.tensor(3, dtype=torch.bfloat16)]},
        }  # fmt: skip
        with self.open("everything") as ckpt:
            dcp.save(state, checkpoint_id="step-3", storage_writer=MemoryWriter(ckpt))
            empty = torch.zeros(7, 5)
            found = {
                "rows": distribute_tensor(empty, mesh, [Replicate()]),
                "columns": distribute_tensor(empty, mesh, [Shard(0)]),
                "all": distribute_tensor(empty, mesh, [Shard(1)]), "plain": torch.zeros(3),
                "nested": {"n": 0, "text": "", "list": [0, 0.0, torch.tensor(0, dtype=torch.bfloat16)]},
            }  # fmt: skip
            dcp.load(found, checkpoint_id="step-3", storage_reader=MemoryReader(ckpt))
        for number, name in enumerate(("rows", "columns", "all")):
            self.assertTrue(torch.equal(found[name].full_tensor(), whole + number))  # type: ignore[attr-defined]
        self.same(found["plain"], state["plain"])
        self.same(found["nested"], state["nested"])

    def whole_states(self) -> None:
        """What one rank has gathered of a model is loaded by all ranks, each its part."""
        model, again = fully_shard(self.model()), fully_shard(self.model())
        self.step(model, torch.optim.SGD(model.parameters(), lr=0.1))
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        self.assertEqual(len(whole), 0 if self.rank else 4)
        with self.open("whole") as ckpt:
            dcp.save(whole, checkpoint_id="step-1", storage_writer=MemoryWriter(ckpt))
            found = get_model_state_dict(again)
            dcp.load(found, checkpoint_id="step-1", storage_reader=MemoryReader(ckpt))
        self.same(found, get_model_state_dict(model))

    def parts(self) -> None:
        """A load takes what it asks for; what was not saved is refused, or left alone where the planner allows it."""
        mesh = init_device_mesh("cpu", (2,))
        rows = distribute_tensor(torch.arange(12.0).reshape(6, 2), mesh, [Shard(0)])
        with self.open("parts") as ckpt:
            dcp.save({"a": {"rows": rows, "n": 4}, "b": torch.ones(2)}, storage_writer=MemoryWriter(ckpt))
            reader = MemoryReader(ckpt)
            one = {"a": {"rows": distribute_tensor(torch.zeros(6, 2), mesh, [Shard(1)])}}
            dcp.load(one, storage_reader=reader)
            self.assertTrue(torch.equal(one["a"]["rows"].full_tensor(), rows.full_tensor()))
            more = {"b": torch.zeros(2), "absent": torch.full((2,), 5.0)}
            with self.assertRaisesRegex(CheckpointException, "absent"):
                dcp.load(dict(more), storage_reader=reader)
            dcp.load(more, storage_reader=reader, planner=DefaultLoadPlanner(allow_partial_load=True))
            self.same(more, {"b": torch.ones(2), "absent": torch.full((2,), 5.0)})
            with self.assertRaisesRegex(CheckpointException, "Size mismatch"):
                dcp.load({"b": torch.zeros(3)}, storage_reader=reader)

    def planners(self) -> None:
        """Planners that keep their plans, that change what is saved, and that load it by other names."""
        mesh = init_device_mesh("cpu", (2,))
        with self.open("planners") as ckpt:
            writer, reader = MemoryWriter(ckpt), MemoryReader(ckpt)
            for step, planner in enumerate((Halves, Halves, lambda: DefaultSavePlanner(enable_plan_caching=True),
                                            lambda: DefaultSavePlanner(enable_plan_caching=True))):  # fmt: skip
                rows = distribute_tensor(torch.arange(8.0) + step, mesh, [Shard(0)])
                kind = torch.half if planner is Halves else torch.float
                dcp.save({"rows": rows}, checkpoint_id=f"step-{step}", storage_writer=writer, planner=planner())
                for name, its in (("rows", DefaultLoadPlanner()), ("lines", Renames())):
                    found = {name: distribute_tensor(torch.zeros(8, dtype=kind), mesh, [Shard(0)])}
                    dcp.load(found, checkpoint_id=f"step-{step}", storage_reader=reader, planner=its)
                    self.same(found[name], rows.to(kind))

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
        self.meshes(both)

    def meshes(self, both: DeviceMesh) -> None:
        """DTensors of two dimensions, of odd sizes and with nothing on some rank, on other meshes than before."""
        wholes = {f"{rows}": torch.arange(float(rows * 5)).reshape(rows, 5) for rows in (7, 3, 1)}
        line = init_device_mesh("cpu", (4,))
        with self.open("meshes") as ckpt:
            saved = {name: distribute_tensor(whole, both, [Shard(0), Shard(1)]) for name, whole in wholes.items()}
            dcp.save(saved, checkpoint_id="step-1", storage_writer=MemoryWriter(ckpt))
            for mesh, placements in ((line, [Shard(0)]), (both, [Replicate(), Shard(1)]), (both, [Shard(0), Shard(0)])):
                found = {name: distribute_tensor(whole * 0, mesh, placements) for name, whole in wholes.items()}
                dcp.load(found, checkpoint_id="step-1", storage_reader=MemoryReader(ckpt))
                self.same({name: one.full_tensor() for name, one in found.items()}, wholes)


if __name__ == "__main__":
    unittest.main()
