"""Which ranks hold the same shard, and process groups of ranks that save and load together."""

from __future__ import annotations

import dataclasses
import datetime
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from mlflash import Checkpointer
from mlflash.errors import DeadlineExceeded, MlflashError, StepNotFound, Unrestorable, WorldMismatch

from ..dcp import MemoryReader, MemoryWriter

log = logging.getLogger("mlflash")


@dataclasses.dataclass
class Group:
    """Ranks that save and load together."""

    ranks: tuple[int, ...]  # ranks of the world, in the order of the process group
    process_group: Any  # the process group that the user gave
    planning: Any  # this and `status` are gloo groups of the same ranks, one for each thread; training uses neither
    status: Any

    @staticmethod
    def of(process_group: Any) -> Group:
        """Make the group of a process group. Collective over it. None: the default group."""
        ranks = tuple(dist.get_process_group_ranks(process_group or dist.group.WORLD))
        return Group(ranks, process_group or dist.group.WORLD, _new_group(ranks), _new_group(ranks))

    @staticmethod
    def of_ranks(ranks: Sequence[int]) -> Group:
        """Make the group of some ranks of the world. Collective over these."""
        return Group(tuple(ranks), _new_group(ranks), _new_group(ranks), _new_group(ranks))

    def coordinator(self, rank: int | None) -> int:
        """Give the place in the group of a rank of the world. None: of the lowest rank."""
        wanted = min(self.ranks) if rank is None else rank
        if wanted not in self.ranks:
            raise WorldMismatch("the coordinator is not in the process group", expected=f"one of {self.ranks}",
                                found=str(rank))  # fmt: skip
        return self.ranks.index(wanted)


class Everyone:
    """All ranks of torch.distributed, which tell each other what their groups load.

    Each rank can make this object by itself.
    """

    def __init__(self, timeout_s: float):
        self._timeout_s = timeout_s
        self._group: Any = None

    def that_load(self, name: str, group: Group) -> tuple[int, ...]:
        """Give the ranks of all groups that load the same name now, ascending. Collective over all ranks."""
        if self._is_all(group.ranks):
            return tuple(sorted(group.ranks))
        said = self._told((name, group.ranks))
        return tuple(sorted({rank for theirs, ranks in said if theirs == name for rank in ranks}))

    def newest(self, name: str, ranks: Sequence[int], wanted: int | None, find: Callable[[], Sequence[int]]
               ) -> int | None:  # fmt: skip
        """Choose the newest step that all groups have which load now: usually they load parts of one state.

        Each group commits by itself, so after a crash some may have one step more than others. If the id names
        a step (``wanted``), the other groups need not have it. Collective over all ranks.
        """
        if self._is_all(ranks):
            return next(reversed(find()), None)
        steps: Sequence[int] = ()
        problem: MlflashError | None = None
        try:
            steps = find()
        except MlflashError as error:  # the others must hear of it
            problem = error
        said = self._told((name, wanted, steps, problem and str(problem)))
        if problem is not None:
            raise problem
        for theirs, _, _, why in said:
            if why is not None:
                raise StepNotFound(f"another process group could not load its part: {why}", found=theirs)
        if wanted is not None:
            return wanted if steps else None
        have = {theirs: found for theirs, step, found, _ in said if step is None}
        if common := set[int].intersection(*map(set, have.values())):
            return max(common)
        if not any(have.values()):
            return None
        raise Unrestorable(
            "the process groups that load now have no step in common, so training would go on from parts of different "
            "steps. If the groups do not load parts of one state, use ids that name the step: these are loaded anyway",
            found="; ".join(f"{theirs}: {', '.join(map(str, found)) or 'nothing'}" for theirs, found in have.items()),
        )  # fmt: skip

    def _is_all(self, ranks: Sequence[int]) -> bool:
        return sorted(ranks) == list(range(dist.get_world_size()))

    def _told(self, mine: Any) -> list[Any]:
        said: list[Any] = [None] * dist.get_world_size()
        try:
            if self._group is None:
                self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=self._timeout_s))
            dist.all_gather_object(said, mine, group=self._group)
        except RuntimeError as error:  # gloo raises no other error
            raise DeadlineExceeded(
                "not all ranks came to this load: all ranks of torch.distributed must load at the same time, each with "
                "its own process group", rank=dist.get_rank(), expected=f"all within {self._timeout_s:g} s",
                found=str(error).splitlines()[0],
            ) from error  # fmt: skip
        return said


class Member:
    """The Checkpointer of one group for one name. Collective over the group."""

    def __init__(self, group: Group, job: str, settings: dict[str, Any]):
        self.checkpointer = Checkpointer(job=job, process_group=group.process_group, **settings)
        self.writer, self.reader = MemoryWriter(self.checkpointer), MemoryReader(self.checkpointer)

    def steps(self, wanted: int | None) -> list[int]:
        """List the steps that can be loaded, the newest last, or only the wanted one. Collective over the group.

        The newest of them is verified. The list is empty if nothing was saved.
        """
        steps = self.checkpointer.steps()
        if wanted is not None and steps:
            if wanted not in steps:
                raise StepNotFound("this step was not saved under this id, or is gone", step=wanted,
                                   found=f"steps that can be loaded: {steps}")  # fmt: skip
            return [wanted]
        newest = self.checkpointer.adapting.newest_step()
        if newest is None:
            return []
        return [*(step for step in steps if step < newest), newest] if wanted is None else [wanted]


def _new_group(ranks: Sequence[int]) -> Any:
    every = tuple(ranks) == tuple(range(dist.get_world_size()))
    return dist.new_group(
        backend="gloo", **({} if every else {"ranks": list(ranks), "use_local_synchronization": True})
    )


# What a model says about the ranks that hold its shards, like SMP's ``state.ranker``.


class Ranker:
    """Knows which ranks hold each shard of a model. Collective over all ranks of torch.distributed.

    Args:
        model: a model of FSDP1, FSDP2, DTensors or DDP. For any other model mlflash assumes that no two ranks hold the
            same. It also does so, with a warning, if some parameters belong to none of these, as experts may.
        part: a name of what this rank holds, such as its checkpoint id (``f"tp{tp}_ep{ep}_fsdp{shard}"``). Ranks with
            the same name are replicas. Default: mlflash finds out from the model.

    Attributes:
        shard: number of this rank's shard, from 0 on, for checkpoint ids such as ``f"tp0_ep0_fsdp{shard}"``.
    """

    def __init__(self, model: torch.nn.Module, part: str | None = None):
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, tuple(sorted(_replicas(model))) if part is None else part)
        alike = [tuple(rank for rank, other in enumerate(parts) if other == part_of_rank) for part_of_rank in parts]
        self._groups = [list(ranks) for ranks in sorted(set(parts if part is None else alike))]
        self.shard = next(n for n, ranks in enumerate(self._groups) if dist.get_rank() in ranks)

    def get_rep_groups(self) -> list[list[int]]:
        """Give the ranks that hold each shard. All ranks get the same list, so that all can make the same groups."""
        return [list(ranks) for ranks in self._groups]

    def get_rep_rank(self, rank: int) -> int:
        """Give the number of a rank among the ranks that hold the same shard."""
        return next(ranks.index(rank) for ranks in self._groups if rank in ranks)


def with_other_shards(model: torch.nn.Module) -> set[int]:
    """Give the ranks that hold other shards of this rank's tensors, according to the model. Not collective."""
    return {rank for _, alike, ranks in _places(model) for rank in ranks - alike}


def _replicas(model: torch.nn.Module) -> set[int]:
    """Give all ranks that hold the same as this one, according to the model."""
    found, known = set(range(dist.get_world_size())), set[int]()
    for parameters, alike, _ in _places(model):
        known |= parameters
        found &= alike
    unknown = [name for name, parameter in model.named_parameters() if id(parameter) not in known]
    if known and unknown and dist.get_rank() == 0:
        log.warning("%d parameters, such as %s, belong to no FSDP, DDP or mesh: mlflash assumes that no two ranks hold "
                    "the same. If some do, say which by Ranker(model, part=...)", len(unknown), unknown[0])  # fmt: skip
    return {dist.get_rank()} if unknown or not known else found


def _places(model: torch.nn.Module) -> Iterator[tuple[set[int], set[int], set[int]]]:
    """Give ids of parameters, the ranks that hold the same part of these, and all ranks that hold a part of these."""
    me = dist.get_rank()
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            inside, ranks = module.module.named_parameters(), set(dist.get_process_group_ranks(module.process_group))
            yield {id(param) for name, param in inside if name not in module.parameters_to_ignore}, ranks, ranks
        if isinstance(module, FSDP1) and module.process_group is not None:
            ranks = set(dist.get_process_group_ranks(module.process_group))
            across = getattr(module, "_inter_node_pg", None)  # that of hybrid sharding
            alike = {me} if across is None else set(dist.get_process_group_ranks(across))
            flat = None if module._handle is None else module._handle.flat_param
            flat_parameters = () if flat is None else (flat, *(flat._params or ()))
            if module.sharding_strategy is ShardingStrategy.NO_SHARD:
                alike = ranks
            yield {id(param) for param in flat_parameters}, alike, ranks | alike
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            yield {id(parameter)}, _alike(parameter), set(parameter.device_mesh.mesh.flatten().tolist())


def _alike(parameter: DTensor) -> set[int]:
    """Give the ranks of a parameter's mesh that hold the same part of the parameter."""
    mesh, coordinate = parameter.device_mesh, parameter.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is not in the mesh of its own parameter"
    part = tuple(slice(None) if placement.is_replicate() else place
                 for place, placement in zip(coordinate, parameter.placements, strict=True))  # fmt: skip
    return set(mesh.mesh[part].flatten().tolist())
