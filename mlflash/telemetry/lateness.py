"""How long each phase of a save takes on this rank → which rank a commit waits for, in which phase, for how long.

`Riding` finds it out, and `Stragglers` decides when it is worth a warning: not for the noise of a save, and once until
it changes.

It uses an allreduce that a commit makes anyway, which takes the minimum of each number. For each phase, every rank
contributes its seconds and its rank in one number. In addition three ranks, different ones in each commit, contribute
all their seconds, in place of a median over all ranks. Only durations are compared, because the clocks of nodes differ.
"""

from __future__ import annotations

import collections
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

PHASES = {
    "training": "it comes to save later",
    "copy": "it takes longer to copy its state into its slot",
    "deferred": "it takes longer for the copies that save leaves for later",
    "checksums": "its courier takes longer for checksums, parity and the check of what arrives",
    "transfer": "it takes longer to send and receive what protects it",
}
"""In words, in the order in which their numbers are sent."""

NUMBERS = len(PHASES) + 3
"""How many numbers ride on the allreduce."""

_WORK = ("copy", "deferred", "checksums")
_NOTHING = (1 << 63) - 1  # from a rank that was not drawn
_RANK_BITS = 24
_MOST_US = 1 << (62 - _RANK_BITS)
_CODE_BITS = 12
_CODES_PER_E = ((1 << _CODE_BITS) - 1) / math.log(_MOST_US)  # makes a code exact to 0.4 %

_LEAST_S, _LEAST_SHARE = 0.25, 0.2  # later by seconds, and by a share of the time from `save` to the commit
_TIMES, _OF = 3, 6  # late in so many of so many commits
_CALM = 12  # it is forgotten after so many commits without lateness


class Late(NamedTuple):
    """A rank that was later than most others, the phase, and by how many seconds."""

    rank: int
    phase: str
    seconds: float


class Lateness(NamedTuple):
    """What each rank knows when a commit was agreed on."""

    slowest: Late
    own: Late  # this rank, in the phase in which it was latest
    node: str


class Riding:
    """The numbers that are sent along with the agreement of one commit.

    Args:
        generation: of the attempt; it decides which ranks contribute all their seconds.
        took: seconds of each phase on this rank. For "training": the seconds that it waited for others to come to this
            save, so the last one waits least.
    """

    def __init__(self, rank: int, size: int, generation: int, took: Mapping[str, float]):
        self._rank, self._size, self._took = rank, size, took
        drawn = random.Random(generation).sample(range(size), min(3, size))
        whole = sum(_code(took[phase]) << _CODE_BITS * at for at, phase in enumerate(PHASES))
        samples = [whole if rank == one else _NOTHING for one in drawn]
        slowest = [_packed(took[phase], rank) * (1 if phase == "training" else -1) for phase in PHASES]
        self.numbers = [*slowest, *samples, *[_NOTHING] * (3 - len(samples))]
        """What this rank brings."""

    def heard(self, least: Sequence[int], name_of: Callable[[int], str]) -> Lateness | None:
        """Interpret the minimum of each number over all ranks; None if there is no other rank to compare with."""
        samples = [sample for sample in least[len(PHASES) :] if sample != _NOTHING]
        if not samples or self._size == 1:
            return None
        usual = {phase: statistics.median_low([_decoded(sample, at) for sample in samples])
                 for at, phase in enumerate(PHASES)}  # fmt: skip
        # A rank that waits is on time.
        usual["training"] = statistics.median_high([_decoded(sample, 0) for sample in samples])
        most = {phase: _unpacked(abs(number)) for phase, number in zip(PHASES, least, strict=False)}
        # A rank that is late at work makes others wait. Only waits beyond that are news.
        late_copy, late_deferred, late_checksums = (max(0.0, most[phase][0] - usual[phase]) for phase in _WORK)
        copied_late = max(late_copy, late_deferred)
        explained = {"training": copied_late, "transfer": max(copied_late, late_checksums)}

        def beyond(phase: str, seconds: float) -> float:
            late_s = usual[phase] - seconds if phase == "training" else seconds - usual[phase]
            return late_s - explained.get(phase, 0.0)

        slowest = max((Late(rank, phase, beyond(phase, seconds)) for phase, (seconds, rank) in most.items()), key=_by)
        own = max((Late(self._rank, phase, beyond(phase, self._took[phase])) for phase in PHASES), key=_by)
        slowest, own = (late._replace(seconds=max(0.0, late.seconds)) for late in (slowest, own))
        return Lateness(slowest, own, name_of(slowest.rank))


def _by(late: Late) -> float:
    return late.seconds


def _microseconds(seconds: float) -> int:
    return min(max(0, round(seconds * 1e6)), _MOST_US - 1)


def _packed(seconds: float, rank: int) -> int:
    return _microseconds(seconds) << _RANK_BITS | rank


def _unpacked(number: int) -> tuple[float, int]:
    return (number >> _RANK_BITS) / 1e6, number & ((1 << _RANK_BITS) - 1)


def _code(seconds: float) -> int:
    return round(_CODES_PER_E * math.log(1 + _microseconds(seconds)))


def _decoded(sample: int, at: int) -> float:
    code = sample >> _CODE_BITS * at & ((1 << _CODE_BITS) - 1)
    return math.expm1(code / _CODES_PER_E) / 1e6


def is_worth_a_word(late_s: float, commit_s: float) -> bool:
    """Whether a commit, so many seconds after its `save`, would have been notably earlier without one rank."""
    return late_s >= max(_LEAST_S, _LEAST_SHARE * commit_s)


class Straggler(NamedTuple):
    """A rank that commits keep waiting for."""

    late: Late
    times: int  # times, of: in how many of how many commits
    of: int


class Stragglers:
    """Tells a straggler from a rank that is late now and then.

    A straggler is reported when a rank is the one that notably delays three of six commits in the same phase. It is
    reported again when it does so in another phase, or after twelve commits that it has not delayed.
    """

    def __init__(self) -> None:
        self._newest: collections.deque[Late | None] = collections.deque(maxlen=_OF)
        self._told: dict[int, set[str]] = {}  # what was reported: rank → phases
        self._calm: dict[int, int] = {}  # for reported ranks: rank → commits since it was late

    def add(self, slowest: Late, commit_s: float) -> Straggler | None:
        """Add the slowest rank of one commit; return the straggler to report now."""
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
