"""Process groups with a Checkpointer and gloo groups of their own, and what all ranks tell each other in a load."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from mlflash import Checkpointer
from mlflash.errors import DeadlineExceeded, MlflashError, StepNotFound, Unrestorable, WorldMismatch

from ..dcp import MemoryReader, MemoryWriter


@dataclasses.dataclass
class Group:
    """Ranks that save and load together.

    Attributes:
        ranks: ranks of the world, in the order of the process group.
        process_group: the process group that the user gave.
        planning, status: gloo groups of the same ranks, one for each thread. Training uses neither.
    """

    ranks: tuple[int, ...]
    process_group: Any
    planning: Any
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
        """Gather a value from all ranks. Collective over all of them."""
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
    """The Checkpointer of one group for one name.

    Collective over the group.
    """

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
        return [*(one for one in steps if one < newest), newest] if wanted is None else [wanted]

    def close(self) -> None:
        self.checkpointer.close()


def _new_group(ranks: Sequence[int]) -> Any:
    every = tuple(ranks) == tuple(range(dist.get_world_size()))
    return dist.new_group(
        backend="gloo", **({} if every else {"ranks": list(ranks), "use_local_synchronization": True})
    )
