"""Read lines of the journal of ``mlflash run`` about training that continues in the same processes.

These lines have neither run nor node. They concern all ranks, and their times come from the clock of `mlflash run`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from .fields import MOST_RANKS, number, text, whole

_KINDS = frozenset(("start", "end", "finish", "guard", "recovered", "host_back", "late"))
_MOST_TIMES = 20
_LONGEST_NAME = 40


@dataclasses.dataclass(frozen=True, slots=True)
class Recovered:
    """Ranks were lost, the other processes stayed, and all ranks train again.

    Attributes:
        time: Unix seconds, when all ranks trained again.
        seconds: seconds from the known loss until then.
        round: the round that began, from 2 on.
        lost: the lost ranks.
        why: the reason in words.
        step: the step that all ranks went back to.
        times: seconds of each phase, each on the slowest rank.
    """

    time: float
    seconds: float
    round: int
    lost: tuple[int, ...]
    why: str
    step: int
    times: Mapping[str, float]

    @property
    def began(self) -> float:
        """When the loss was known, Unix seconds."""
        return self.time - self.seconds

    @property
    def parts(self) -> dict[str, float]:
        """The times that can be part of the recovery. A spare counts its wait from its own start, long before."""
        return {name: took for name, took in self.times.items() if took <= self.seconds}


@dataclasses.dataclass(frozen=True, slots=True)
class Late:
    """A rank was killed because it was not ready in time.

    Attributes:
        time: Unix seconds.
        round: the round that it missed.
        rank: the rank.
        phase: what it should have done.
    """

    time: float
    round: int
    rank: int
    phase: str


def is_of_journal(document: Mapping[str, Any]) -> bool:
    """Say whether a line is from a journal and not from a rank."""
    kind = document.get("event")
    of_ranks = {"run", "node"} if kind == "late" else {"run", "node", "rank"}
    return isinstance(kind, str) and kind in _KINDS and not of_ranks & document.keys()


def understand(document: Mapping[str, Any]) -> Recovered | Late | bool:
    """Read a line of a journal.

    Args:
        document: a line for which `is_of_journal` is true.

    Returns:
        True: the line is of another kind. False: a field is missing or not valid.
    """
    if document["event"] == "recovered":
        return _recovered(document) or False
    if document["event"] == "late":
        return _late(document) or False
    return number(document.get("time")) is not None


def _recovered(document: Mapping[str, Any]) -> Recovered | None:
    time, seconds = number(document.get("time")), number(document.get("seconds"))
    round_, step = whole(document.get("round"), 1 << 63), whole(document.get("step"), 1 << 63)
    lost, times = document.get("lost"), document.get("times", {})
    if time is None or seconds is None or round_ is None or step is None or seconds > time:
        return None
    if not (isinstance(lost, list) and lost and isinstance(times, dict) and len(times) <= _MOST_TIMES):
        return None
    ranks = [whole(rank, MOST_RANKS) for rank in lost]
    took = {name[:_LONGEST_NAME]: number(value) for name, value in times.items()}
    known = {name: value for name, value in took.items() if value is not None}
    those = sorted({rank for rank in ranks if rank is not None})
    if None in ranks or len(known) < len(took):
        return None
    return Recovered(time, round(seconds, 9), round_, tuple(those), text(document.get("why")), step, known)


def _late(document: Mapping[str, Any]) -> Late | None:
    time, rank = number(document.get("time")), whole(document.get("rank"), MOST_RANKS)
    round_ = whole(document.get("round"), 1 << 63)
    if time is None or rank is None or round_ is None:
        return None
    return Late(time, round_, rank, text(document.get("phase")))
