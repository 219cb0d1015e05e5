"""What tests of the DCP adapter share: states, their bits, and planners that a checkpoint process can import.

MPI is not imported here: the checkpoint processes of PyTorch unpickle planners of this module.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from waiting import take


def local_tensors(value: Any, path: str = "") -> dict[str, torch.Tensor]:
    if isinstance(value, Mapping):
        return {k: t for key, sub in value.items() for k, t in local_tensors(sub, f"{path}.{key}").items()}
    if isinstance(value, (list, tuple)):
        return {k: t for i, sub in enumerate(value) for k, t in local_tensors(sub, f"{path}.{i}").items()}
    if isinstance(value, ShardedTensor):
        return {f"{path}@{s.metadata.shard_offsets}": s.tensor.detach() for s in value.local_shards()}
    if isinstance(value, DTensor):
        return {f"{path}@{value.placements}": value.to_local().detach()}
    return {path: value.detach()} if isinstance(value, torch.Tensor) else {}


def others(value: Any, path: str = "") -> dict[str, Any]:
    """All that is no tensor, by path."""
    if isinstance(value, Mapping):
        return {k: t for key, sub in value.items() for k, t in others(sub, f"{path}.{key}").items()}
    if isinstance(value, (list, tuple)):
        return {k: t for i, sub in enumerate(value) for k, t in others(sub, f"{path}.{i}").items()}
    return {} if isinstance(value, (torch.Tensor, ShardedTensor)) else {path: value}


def bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Dtype, shape and bytes: NaN is equal to itself, and 0.0 is not -0.0."""
    raw = tensor.detach().resolve_conj().contiguous().reshape(-1)
    return tensor.dtype, tuple(tensor.shape), raw.view(torch.uint8).numpy().tobytes() if raw.numel() else b""


@dataclasses.dataclass(frozen=True)
class Kept:
    tensors: dict[str, tuple[Any, ...]]
    others: dict[str, Any]

    @staticmethod
    def of(state: Any) -> Kept:
        tensors = {path: bits(tensor) for path, tensor in local_tensors(state).items()}
        return Kept(tensors, copy.deepcopy(others(state)))

    def check(self, state: Any) -> None:
        now = Kept.of(state)
        assert now.tensors.keys() == self.tensors.keys()
        assert [path for path in self.tensors if self.tensors[path] != now.tensors[path]] == []
        assert now.others == self.others


def spoil(state: Any, by: int = 77) -> None:
    for tensor in local_tensors(state).values():
        raw = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 and tensor.dtype != torch.bool else tensor
        raw.logical_not_() if raw.dtype == torch.bool else raw.add_(by)


def state_at(step: int) -> dict[str, Any]:
    whole = torch.arange(10.0 * 33).reshape(10, 33) * (step + 0.1)
    cut = distribute_tensor(whole, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)], src_data_rank=None)
    return {"w": cut, "count": torch.tensor(step), "buffer": torch.full((5,), step + 0.1), "epoch": step,
            "of": {"this": f"step {step}"}}  # fmt: skip


def loads(running: Any, step: int, name: Any = None) -> None:
    """Check that what has this id is the state of a step."""
    Kept.of(state_at(step)).check(running.load(state_at(-1), name))


class HalfPlanner(DefaultSavePlanner):
    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        items = []
        for item in plan.items:
            data = item.tensor_data
            if data is not None and data.properties.dtype == torch.float32:
                properties = dataclasses.replace(data.properties, dtype=torch.float16)
                item = dataclasses.replace(item, tensor_data=dataclasses.replace(data, properties=properties))
            items.append(item)
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    def transform_object(self, write_item: Any, object: Any) -> Any:
        found = super().transform_object(write_item, object)
        is_float = isinstance(found, torch.Tensor) and found.dtype == torch.float32
        return found.to(torch.float16) if is_float else found


class RenamePlanner(DefaultSavePlanner):
    """Saves every name with "ema." before it."""

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner({"ema": state_dict}, storage_meta, is_coordinator)


class DropPlanner(DefaultSavePlanner):
    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        kept = {name: value for name, value in state_dict.items() if "buffer" not in name}
        super().set_up_planner(kept, storage_meta, is_coordinator)


class CachedPlanner(DefaultSavePlanner):
    """Keeps its plans; under another name than torch's own does, as each storage must."""

    def __init__(self) -> None:
        super().__init__(enable_plan_caching=True)


class OtherCachedPlanner(CachedPlanner):
    """The same for another storage."""


class Oops(RuntimeError):
    """What the planners below raise."""


class _Faulty:
    """Fails in one phase on one rank; before a planner of DCP."""

    def __init__(self, phase: str, here: bool, **more: Any):
        super().__init__(**more)
        self.fault = phase if here else ""

    def _reach(self, phase: str) -> None:
        if self.fault == phase:
            raise Oops(f"{phase} failed")

    def create_local_plan(self) -> Any:
        self._reach("create_local_plan")
        return super().create_local_plan()

    def create_global_plan(self, plans: Any) -> Any:
        self._reach("create_global_plan")
        return super().create_global_plan(plans)

    def finish_plan(self, plan: Any) -> Any:
        self._reach("finish_plan")
        return super().finish_plan(plan)


class FaultySave(_Faulty, DefaultSavePlanner):
    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self._reach("set_up_planner")
        super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def resolve_data(self, item: Any) -> Any:
        self._reach("resolve_data")
        if item.type is WriteItemType.BYTE_IO:
            self._reach("resolve_bytes")
        return super().resolve_data(item)


class FaultyLoad(_Faulty, DefaultLoadPlanner):
    def set_up_planner(self, *args: Any, **more: Any) -> None:
        self._reach("set_up_planner")
        super().set_up_planner(*args, **more)

    def resolve_tensor(self, item: Any) -> Any:
        self._reach("resolve_tensor")
        return super().resolve_tensor(item)

    def commit_tensor(self, item: Any, tensor: Any) -> None:
        self._reach("commit_tensor")
        super().commit_tensor(item, tensor)

    def load_bytes(self, item: Any, value: Any) -> None:
        self._reach("load_bytes")
        super().load_bytes(item, value)


sprung: list[str] = []


def spring() -> None:
    sprung.append("sprung")


class Trap:
    def __reduce__(self) -> Any:
        return spring, ()


class Hesitant(DefaultSavePlanner):
    """A planner that takes its time, also on its way to a checkpoint process."""

    def __init__(self, seconds: float):
        super().__init__()
        self._seconds = seconds

    def __getstate__(self) -> dict[str, Any]:
        take(self._seconds)
        return self.__dict__

    def create_local_plan(self) -> Any:
        take(self._seconds)
        return super().create_local_plan()
