"""The ranks of a run as a trainer sees them: its own rank, where the others are, and how they agree.

All collective calls here go through the courier.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from ..errors import ConfigError, DeadlineExceeded, MlflashError, WorldMismatch, text_of
from ..mpi.nonblocking import Agreement
from ..placement.topology import Topology

if TYPE_CHECKING:
    from ..mpi.world import World
    from .client import Client

T = TypeVar("T")
U = TypeVar("U")

Collectives: TypeAlias = "Ranks | World"
"""What ranks do together. `Ranks` does it for trainers, `World` where MPI may be called."""


class Ranks(Agreement):
    """The ranks of one Checkpointer; ``torch_group``: their torch.distributed group; None: its default group."""

    def __init__(self, courier: Client, rank: int, topology: Topology, timeout_s: float, torch_group: Any = None):
        self._courier, self.timeout_s = courier, timeout_s
        self.rank, self.size, self.topology = rank, len(topology.node_of), topology
        self.torch_group = torch_group

    def from_torch(self, ranks: Iterable[int]) -> tuple[int, ...]:
        return from_torch(ranks, self.torch_group)

    def least_of(self, values: Sequence[int], comm: Any = None) -> list[int]:
        return self._least_or_raise(values, None)

    def _least_or_raise(self, values: Sequence[int], error: MlflashError | None) -> list[int]:
        least: list[int] = self._courier.call("least_or_raise", tuple(values), error)
        return least

    def gather(self, value: Any) -> list[Any]:
        return [pickle.loads(content) for content in self._courier.call("gather", pickle.dumps(value))]

    def broadcast(self, value: Any, root: int) -> Any:
        content = pickle.dumps(value) if self.rank == root else b""
        return pickle.loads(self._courier.call("broadcast", content, root))

    def raise_together(self, error: MlflashError | None) -> None:
        self._least_or_raise((), error)

    def renew_deadline(self) -> None:
        """Do nothing: each call has its own deadline."""

    def tell_doing(self, what: str) -> None:
        self._courier.tell_doing(what)

    def together(self, work: Callable[[], T], foreign: Callable[[str], MlflashError], step: int | None = None) -> T:
        """Do something on this rank. If it fails on any rank, raise the error on all.

        Collective over the world.

        Args:
            foreign: for exceptions of other classes: makes the error for other ranks from the text of the exception.

        Raises:
            MlflashError: on all ranks, the error of the lowest rank that has one. What is no `Exception`, such as an
                interruption, is raised unchanged on its own rank.
        """
        return self._together(work, foreign, step, lambda results, error: self.raise_together(error))[0]

    def together_least(
        self, work: Callable[[], T], values: Callable[[T], Sequence[int]], count: int,
        foreign: Callable[[str], MlflashError], step: int | None = None,
    ) -> tuple[T, list[int]]:  # fmt: skip
        """Like `together`, and take the minimum of ``count`` numbers that follow from the result. Collective."""

        def meet(results: list[T], error: MlflashError | None) -> list[int]:
            return self._least_or_raise([0] * count if error is not None else values(results[0]), error)

        return self._together(work, foreign, step, meet)

    def together_then(self, work: Callable[[], object], foreign: Callable[[str], MlflashError], method: str) -> Any:
        """Like `together`, and let the courier do a job with the result if no rank has an error. Collective."""
        then = lambda results, error: self._courier.call("do_unless", error, method, results)
        return self._together(work, foreign, None, then)[1]

    def _together(self, work: Callable[[], T], foreign: Callable[[str], MlflashError], step: int | None,
                  meet: Callable[[list[T], MlflashError | None], U]) -> tuple[T, U]:  # fmt: skip
        results: list[T] = []
        error: MlflashError | None = None
        interruption: BaseException | None = None
        try:
            results.append(work())
        except MlflashError as problem:
            error = problem
        except BaseException as problem:
            interruption = None if isinstance(problem, Exception) else problem
            error = foreign(text_of(problem))
            error.__cause__ = problem
        if error is not None:
            error.rank, error.node = self.rank, self.node_name
            error.step = error.step if step is None else step
        try:
            agreed = meet(results, error)
        except DeadlineExceeded as late:  # the others still work, or have waited for this rank inside it
            raise late from error
        finally:
            if interruption is not None:
                raise interruption
        return results[0], agreed

    def on_all(self, work: Callable[[], T]) -> T:
        """Like `together`, for work that fails by errors of the operating system. Collective over the world."""
        return self.together(work, lambda why: MlflashError(f"this rank could not go on: {why}"))


def from_torch(ranks: Iterable[int], torch_group: Any) -> tuple[int, ...]:
    """Convert ranks of torch.distributed to ranks of a group (None: the default group), ascending."""
    if torch_group is None:
        return tuple(sorted(ranks))
    known = sys.modules["torch"].distributed.get_process_group_ranks(torch_group)
    return tuple(sorted(known.index(rank) for rank in ranks if rank in known))


# Ranks as PyTorch and users name them


def replicas_of(
    replicated: Any, rank: int, size: int, mpi_group: Any, torch_group: Any
) -> tuple[list[int], list[str]] | None:
    """The ranks that hold the same state as this one, ascending, and patterns for the names of that state.

    Not collective; nothing is sent over a given group.

    Args:
        replicated: an mpi4py communicator or group, a torch.distributed process group, ranks, or True for all ranks;
            or a mapping from patterns of names to one of these; None: the user has not said so.

    Raises:
        ConfigError: it is none of these, or this rank is not in it.
    """
    if replicated is None:
        return None
    if not isinstance(replicated, Mapping):
        return _members_of(replicated, rank, size, mpi_group, torch_group), ["*"]
    sets = [_members_of(group, rank, size, mpi_group, torch_group) for group in replicated.values()]
    if not sets or any(members != sets[0] for members in sets) or not all(isinstance(p, str) for p in replicated):
        raise ConfigError("a dict for replicated= maps patterns of names to ranks, and these must be the same for all",
                          expected="{'model.*': ranks, ...}", found=repr(replicated))  # fmt: skip
    return sets[0], list(replicated)


def _members_of(replicated: Any, rank: int, size: int, mpi_group: Any, torch_group: Any) -> list[int]:
    if replicated is True:
        return list(range(size))
    torch = sys.modules.get("torch")
    of_mpi = hasattr(replicated, "Get_group") or hasattr(replicated, "Translate_ranks")
    if size > 1 and mpi_group is not None and of_mpi:
        group = replicated.Get_group() if hasattr(replicated, "Get_group") else replicated
        ranks = group.Translate_ranks(list(range(group.size)), mpi_group)
    elif (
        torch is not None
        and torch.distributed.is_available()
        and isinstance(replicated, torch.distributed.ProcessGroup)
    ):
        ranks = from_torch(torch.distributed.get_process_group_ranks(replicated), torch_group)
    elif isinstance(replicated, Sequence) and all(isinstance(member, int) for member in replicated):
        ranks = replicated
    else:
        ranks = ()
    members = sorted({int(member) for member in ranks})
    if rank not in members or not 0 <= members[0] <= members[-1] < size:
        raise ConfigError(
            "replicated= must say which ranks hold the same state as this one",
            expected=f"a communicator, process group or list of ranks below {size}, with rank {rank} in it",
            found=repr(replicated),
        )
    return members


def some_ranks(torch_group: Any, rank: int, size: int) -> tuple[int, ...] | None:
    """The ranks of the job that a process group has, in its order; None: all ranks, or no group was given.

    Not collective; nothing is sent over the group.

    Args:
        torch_group: of torch.distributed, whose ranks are those of the job; None: none was given.

    Raises:
        ConfigError: it is no process group, or this process is not in it.
        WorldMismatch: torch.distributed numbers the ranks differently than the launcher does.
    """
    if torch_group is None:
        return None
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(torch_group, torch.distributed.ProcessGroup):
        raise ConfigError(
            "process_group= must be a group of torch.distributed that has this process",
            expected="what torch.distributed.new_group gives its ranks", found=repr(torch_group),
        )  # fmt: skip
    ranks = tuple(torch.distributed.get_process_group_ranks(torch_group))
    if len(ranks) >= size:
        return None
    if (torch_rank := torch.distributed.get_rank()) != rank:
        raise WorldMismatch(
            "torch.distributed and the launcher number the ranks differently, so mlflash cannot find the ranks of the "
            "process group: initialize torch.distributed by mlflash.adapters.distributed.init_process_group",
            expected=f"torch.distributed rank {rank} of {size}", found=f"torch.distributed rank {torch_rank}",
        )  # fmt: skip
    return ranks


def check_torch_rank(rank: int, size: int, torch_group: Any) -> None:
    """Raise WorldMismatch if the rank in torch.distributed is not the rank of this run."""
    torch = sys.modules.get("torch")
    if torch is None or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    torch_rank = torch.distributed.get_rank(torch_group)
    torch_size = torch.distributed.get_world_size(torch_group)
    if (torch_rank, torch_size) != (rank, size):
        raise WorldMismatch(
            "torch.distributed and MPI number the ranks differently: initialize torch.distributed with the MPI "
            "rank and size (mlflash.adapters.distributed.init_process_group does so), give Checkpointer a comm ordered "
            "like it (comm.Split(0, torch_rank)), or the process group that has the ranks of comm (process_group=)",
            expected=f"torch.distributed rank {rank} of {size}, as in MPI",
            found=f"torch.distributed rank {torch_rank} of {torch_size}",
        )
