"""What ranks agree on by name, each time by one allreduce of minima.

`World` agrees where MPI may be called, and `protocol.ranks.Ranks` by the courier. All of it is collective over their
ranks, and all ranks call with the same names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

_NOTHING: Mapping[str, int] = {}


class Agreement:
    """How ranks agree. ``least_of`` is what a class of ranks defines."""

    def least_of(self, values: Sequence[int], comm: Any = None) -> list[int]:
        """Take the minimum of each number over all ranks of ``comm``; None: all ranks."""
        raise NotImplementedError

    def agree(self, *, all_of: Mapping[str, object] = _NOTHING, any_of: Mapping[str, object] = _NOTHING,
              min_of: Mapping[str, int] = _NOTHING, max_of: Mapping[str, int] = _NOTHING,
              comm: Any = None) -> SimpleNamespace:  # fmt: skip
        """Find out what is true on all ranks, or on any, and the smallest and largest of some numbers.

        Example:
            ``agree(all_of={"settled": is_settled}, max_of={"newest": generation})`` returns an object with the
            attributes ``settled`` (bool) and ``newest`` (int), the same on all ranks.
        """
        names = [*all_of, *any_of, *min_of, *max_of]
        own = [*map(bool, all_of.values()), *(not value for value in any_of.values()), *min_of.values(),
               *(-number for number in max_of.values())]  # fmt: skip
        agreed: dict[str, Any] = dict(zip(names, self.least_of(list(map(int, own)), comm), strict=True))
        agreed |= {name: bool(agreed[name]) for name in all_of} | {name: not agreed[name] for name in any_of}
        return SimpleNamespace(**agreed | {name: -agreed[name] for name in max_of})

    def all_of(self, value: object, comm: Any = None) -> bool:
        """Whether something is true on all ranks."""
        return bool(self.least_of([int(bool(value))], comm)[0])

    def any_of(self, value: object, comm: Any = None) -> bool:
        """Whether something is true on any rank."""
        return not self.all_of(not value, comm)

    def largest(self, number: int) -> int:
        """The largest of the ranks' numbers."""
        return -self.least_of([-number])[0]

    def is_same(self, number: int, comm: Any = None) -> bool:
        """Whether all ranks have the same number."""
        low, high = self.least_of([number, -number], comm)
        return low == -high

    def barrier(self) -> None:
        """Return when all ranks have come here."""
        self.least_of([0])
