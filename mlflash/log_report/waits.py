"""Find the ranks that commits waited for, and the phase of saving, from commit events."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from .fields import MOST_RANKS, number, whole
from .launches import Launch


@dataclasses.dataclass(frozen=True)
class Waited:
    """A rank that commits waited for, in one phase of saving.

    Attributes:
        rank, node: the rank and its node; "" if that rank logged nothing.
        phase: phase of saving, such as "copy".
        commits: number of commits in all launches that waited for it.
        median_s, most_s: median and longest wait.
        step: step of the last such commit.
    """

    rank: int
    node: str
    phase: str
    commits: int
    median_s: float
    most_s: float
    step: int


def waited_for(launches: Sequence[Launch]) -> list[Waited]:
    """List the ranks that commits waited for. The rank that delayed them most in total comes first."""
    found: dict[tuple[int, str, str], list[tuple[float, int]]] = {}
    for launch in launches:
        for event in launch.events:
            rank, late_s = whole(event.more.get("slowest"), MOST_RANKS), number(event.more.get("late_s"))
            if event.kind == "commit" and rank is not None and late_s is not None:
                at = rank, launch.places.get(rank, ""), event.text("late_in")
                found.setdefault(at, []).append((late_s, event.step))
    ordered = sorted(found.items(), key=lambda one: -sum(seconds for seconds, _ in one[1]))
    return [_waited(*at, those) for at, those in ordered]


def _waited(rank: int, node: str, phase: str, those: Sequence[tuple[float, int]]) -> Waited:
    seconds = [late_s for late_s, _ in those]
    return Waited(rank, node, phase, len(those), statistics.median(seconds), max(seconds), those[-1][1])
