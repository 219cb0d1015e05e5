"""The ranks of a run as a trainer sees them: its own rank, where the others are, and how they agree.

All collective calls here go through the courier.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, Protocol, TypeVar

from ..errors import DeadlineExceeded, MlflashError, text_of
from ..mpi.agreement import Agreement
from ..placement.topology import Topology
from .client import Client

T = TypeVar("T")
U = TypeVar("U")


class Collectives(Protocol):
    """What ranks do together. `Ranks` does it for trainers, `World` where MPI may be called."""

    rank: int
    size: int
    timeout_s: float

    @property
    def node_name(self) -> str: ...

    def agree(self, *, all_of: Mapping[str, object] = ..., any_of: Mapping[str, object] = ...,
              min_of: Mapping[str, int] = ..., max_of: Mapping[str, int] = ...) -> SimpleNamespace:  # fmt: skip
        """See `Agreement.agree`."""

    def least_of(self, values: Sequence[int]) -> list[int]:
        """Take the minimum of each number over all ranks. Collective over the world."""

    def gather(self, value: Any) -> list[Any]:
        """Give every rank the value of every rank. Collective over the world."""

    def broadcast(self, value: Any, root: int) -> Any:
        """Give every rank the value of one rank. Collective over the world."""

    def raise_together(self, error: MlflashError | None) -> None:
        """If any rank has an error, raise it on all ranks. Collective over the world."""

    def renew_deadline(self) -> None:
        """Start the deadline anew, because all ranks make progress."""

    def tell_doing(self, what: str) -> None:
        """Note what this rank does, for ranks that wait for it, such as "restoring"; "" at its end."""


class Ranks(Agreement):
    """The ranks of one Checkpointer; ``torch_group``: their torch.distributed group; None: its default group."""

    def __init__(self, courier: Client, rank: int, topology: Topology, timeout_s: float, torch_group: Any = None):
        self._courier, self.timeout_s = courier, timeout_s
        self.rank, self.size, self.topology = rank, len(topology.node_of), topology
        self.torch_group = torch_group

    @property
    def node_index(self) -> int:
        return self.topology.node_of[self.rank]

    @property
    def node_name(self) -> str:
        return self.topology.name_of(self.rank)

    def from_torch(self, ranks: Iterable[int]) -> tuple[int, ...]:
        return from_torch(ranks, self.torch_group)

    def least_of(self, values: Sequence[int], comm: Any = None) -> list[int]:
        least: list[int] = self._courier.call("least_of", tuple(values))
        return least

    def gather(self, value: Any) -> list[Any]:
        return [pickle.loads(content) for content in self._courier.call("gather", pickle.dumps(value))]

    def broadcast(self, value: Any, root: int) -> Any:
        content = pickle.dumps(value) if self.rank == root else b""
        return pickle.loads(self._courier.call("broadcast", content, root))

    def raise_together(self, error: MlflashError | None) -> None:
        self._courier.call("raise_together", error)

    def unit(self) -> AbstractContextManager[None]:
        return self._courier.unit()

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

        def agree(results: list[T], error: MlflashError | None) -> list[int]:
            own = [0] * count if error is not None else values(results[0])
            least: list[int] = self._courier.call("least_or_raise", tuple(own), error)
            return least

        return self._together(work, foreign, step, agree)

    def together_then(self, work: Callable[[], object], foreign: Callable[[str], MlflashError], method: str) -> Any:
        """Like `together`, and let the courier do a job with the result if no rank has an error. Collective."""
        then = lambda results, error: self._courier.call("do_unless", error, method, results)
        return self._together(work, foreign, None, then)[1]

    def _together(self, work: Callable[[], T], foreign: Callable[[str], MlflashError], step: int | None,
                  agree: Callable[[list[T], MlflashError | None], U]) -> tuple[T, U]:  # fmt: skip
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
            agreed = agree(results, error)
        except DeadlineExceeded as late:  # the others still work, or have waited for this rank inside it
            raise late from error
        finally:
            if left is not None:
                raise left
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
