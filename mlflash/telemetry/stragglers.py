"""When to warn about a rank that commits wait for: not for the noise of a save, and once until it changes."""

from __future__ import annotations

import collections
import statistics
from typing import NamedTuple

from .lateness import Late

_LEAST_S, _LEAST_SHARE = 0.25, 0.2  # later by seconds, and by a share of the time from `save` to the commit
_TIMES, _OF = 3, 6  # late in so many of so many commits
_CALM = 12  # it is forgotten after so many commits without lateness


def is_worth_a_word(late_s: float, commit_s: float) -> bool:
    """Whether a commit, so many seconds after its `save`, would have been notably earlier without one rank."""
    return late_s >= max(_LEAST_S, _LEAST_SHARE * commit_s)


class Straggler(NamedTuple):
    """A rank that commits keep waiting for.

    Attributes:
        late: the rank, its phase, and by how many seconds it was late (median).
        times, of: in how many of how many commits.
    """

    late: Late
    times: int
    of: int


class Stragglers:
    """Tells a straggler from a rank that is late now and then. Not collective.

    A straggler is reported when a rank is the one that notably delays three of six commits in the same phase. It is
    reported again when it does so in another phase, or after twelve commits that it has not delayed.
    """

    def __init__(self) -> None:
        self._newest: collections.deque[Late | None] = collections.deque(maxlen=_OF)
        self._told: dict[int, set[str]] = {}  # what was reported: rank → phases
        self._calm: dict[int, int] = {}  # for reported ranks: rank → commits since it was late

    def add(self, slowest: Late, commit_s: float) -> Straggler | None:
        """Add the slowest rank of one commit; return the straggler to report now.

        Args:
            slowest: slowest rank of the commit.
            commit_s: seconds from `save` to the commit.
        """
        late = slowest if is_worth_a_word(slowest.seconds, commit_s) else None
        self._newest.append(late)
        for rank in list(self._told):
            self._calm[rank] = 0 if late is not None and late.rank == rank else self._calm[rank] + 1
            if self._calm[rank] >= _CALM:
                del self._told[rank], self._calm[rank]
        if late is None or late.phase in self._told.get(late.rank, ()):
            return None
        alike = [one.seconds for one in self._newest if one is not None and one[:2] == late[:2]]
        if len(alike) < _TIMES:
            return None
        self._told.setdefault(late.rank, set()).add(late.phase)
        self._calm[late.rank] = 0
        return Straggler(late._replace(seconds=statistics.median(alike)), len(alike), len(self._newest))
