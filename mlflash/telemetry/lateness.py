"""How long each phase of a save takes on this rank → which rank a commit waits for, in which phase, for how long.

It uses an allreduce that a commit makes anyway, which takes the minimum of each number. For each phase, every rank
contributes its seconds and its rank in one number. In addition three ranks, different ones in each commit, contribute
all their seconds, in place of a median over all ranks. Only durations are compared, because the clocks of nodes differ.
"""

from __future__ import annotations

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


class Late(NamedTuple):
    """A rank that was later than most others, the phase, and by how many seconds."""

    rank: int
    phase: str
    seconds: float


class Lateness(NamedTuple):
    """What each rank knows when a commit was agreed on.

    Attributes:
        slowest: the rank that the commit waited for.
        own: this rank, in the phase in which it was latest.
        node: node of the slowest one.
    """

    slowest: Late
    own: Late
    node: str


class Riding:
    """The numbers that are sent along with the agreement of one commit. Not collective.

    Args:
        rank, size: of the world.
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
        """Interpret the minimum of each number over all ranks; None if there is no other rank to compare with.

        Args:
            least: these minima.
            name_of: returns the node of a rank.
        """
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
    """Pack a duration and a rank into one number, which grows with the duration."""
    return _microseconds(seconds) << _RANK_BITS | rank


def _unpacked(number: int) -> tuple[float, int]:
    return (number >> _RANK_BITS) / 1e6, number & ((1 << _RANK_BITS) - 1)


def _code(seconds: float) -> int:
    return round(_CODES_PER_E * math.log(1 + _microseconds(seconds)))


def _decoded(sample: int, at: int) -> float:
    code = sample >> _CODE_BITS * at & ((1 << _CODE_BITS) - 1)
    return math.expm1(code / _CODES_PER_E) / 1e6
