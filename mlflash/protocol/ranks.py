"""The ranks of a run as a trainer sees them: which one it is, where the others are, and what they agree on.

All that is collective here goes through the courier.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from ..errors import DeadlineExceeded, MlflashError, text_of
from ..placement.topology import Topology
from .client import Client
from .messages import Agree, Broadcast, Gather, RaiseTogether

T = TypeVar("T")


class Collectives(Protocol):
    """What ranks agree on; `Ranks` has it for trainers, `World` where MPI may be called.

    Attributes:
        rank, size: of this one, and of all.
    """

    rank: int
    size: int

    def agree(self, values: Sequence[int]) -> list[int]:
        """Take the minimum of each number over all ranks. Collective over the world."""

    def gather(self, value: Any) -> list[Any]:
        """Give every rank the value of every rank. Collective over the world."""

    def broadcast(self, value: Any, root: int) -> Any:
        """Give every rank the value of one. Collective over the world."""

    def raise_together(self, error: MlflashError | None) -> None:
        """Raise on every rank what went wrong on any. Collective over the world."""

    def renew_deadline(self) -> None:
        """Begin to wait anew: all ranks get on. Not collective."""


class Ranks:
    """The ranks of one Checkpointer.

    Args:
        courier: takes messages to the courier.
        rank, topology: of this rank, and where all are.
        torch_group: the process group of torch.distributed that has these ranks; None: its default group.
    """

    def __init__(self, courier: Client, rank: int, topology: Topology, torch_group: Any = None):
        self._courier = courier
        self.rank, self.size, self.topology = rank, len(topology.node_of), topology
        self.torch_group = torch_group

    @property
    def node_index(self) -> int:
        return self.topology.node_of[self.rank]

    @property
    def node_name(self) -> str:
        return self.topology.name_of(self.rank)

    def from_torch(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Which of these ranks some ranks of torch.distributed are, ascending. Not collective."""
        return from_torch(ranks, self.torch_group)

    def agree(self, values: Sequence[int]) -> list[int]:
        """Take the minimum of each number over all ranks. Collective over the world."""
        agreed: list[int] = self._courier.call(Agree(tuple(values)))
        return agreed

    def gather(self, value: Any) -> list[Any]:
        """Give every rank the (pickled) value of every rank. Collective over the world."""
        return [pickle.loads(content) for content in self._courier.call(Gather(pickle.dumps(value)))]

    def broadcast(self, value: Any, root: int) -> Any:
        """Give every rank the (pickled) value of one. Collective over the world."""
        content = pickle.dumps(value) if self.rank == root else b""
        return pickle.loads(self._courier.call(Broadcast(content, root)))

    def raise_together(self, error: MlflashError | None) -> None:
        """Raise on every rank what went wrong on any. Collective over the world.

        Raises:
            MlflashError: that of the lowest rank that brought one.
        """
        self._courier.call(RaiseTogether(error))

    def unit(self) -> AbstractContextManager[None]:
        """Make one unit of what is called for meanwhile, see `client.Client`."""
        return self._courier.unit()

    def renew_deadline(self) -> None:
        """Nothing is to be done: each call has a deadline of its own."""

    def together(self, work: Callable[[], T], foreign: Callable[[str], MlflashError], step: int | None = None) -> T:
        """Do something on this rank, where this is called; what goes wrong on any rank is raised on all.

        Collective over the world.

        Args:
            work: may raise anything.
            foreign: makes the error that other ranks are told, where it is none of ours, of its text.
            step: what it is about.

        Raises:
            MlflashError: on all ranks, what went wrong on the lowest one. What is no `Exception`, such as an
                interruption, is raised as it is where it came.
        """
        results: list[T] = []
        error: MlflashError | None = None
        left: BaseException | None = None
        try:
            results.append(work())
        except MlflashError as problem:
            error = problem
        except BaseException as problem:
            left = None if isinstance(problem, Exception) else problem
            error = foreign(text_of(problem))
            error.__cause__ = problem
        if error is not None:
            error.rank, error.node = self.rank, self.node_name
            error.step = error.step if step is None else step
        try:
            self.raise_together(error)
        except DeadlineExceeded as late:  # the others are still at it, or waited for this rank in the middle of it
            raise late from error
        finally:
            if left is not None:
                raise left
        return results[0]

    def on_all(self, work: Callable[[], T]) -> T:
        """As `together`, where what may go wrong is of the operating system, as a rule. Collective over the world."""
        return self.together(work, lambda why: MlflashError(f"this rank could not go on: {why}"))


def from_torch(ranks: Iterable[int], torch_group: Any) -> tuple[int, ...]:
    """Which ranks of a group some ranks of torch.distributed are, ascending. Not collective.

    Args:
        ranks: of torch.distributed.
        torch_group: of it; None: its default group.
    """
    if torch_group is None:
        return tuple(sorted(ranks))
    known = sys.modules["torch"].distributed.get_process_group_ranks(torch_group)
    return tuple(sorted(known.index(rank) for rank in ranks if rank in known))
