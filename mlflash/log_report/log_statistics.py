"""Statistics of what was logged: stalls, bandwidth, commits, drains, memory, warnings."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence

from .launches import Committed, Launch, nodes_of
from .read_logs import Event


@dataclasses.dataclass(frozen=True)
class Spread:
    """Some numbers in short.

    Attributes:
        count: how many there are; where there is none, the others are 0.
        mean, median, p95, most: of them. The p95 is one of them: 95 % of all are not above it.
    """

    count: int = 0
    mean: float = 0.0
    median: float = 0.0
    p95: float = 0.0
    most: float = 0.0


def spread(numbers: Iterable[float]) -> Spread:
    """Put numbers in short."""
    those = sorted(numbers)
    if not those:
        return Spread()
    at = math.ceil(0.95 * len(those)) - 1
    return Spread(len(those), statistics.fmean(those), statistics.median(those), those[at], those[-1])


@dataclasses.dataclass(frozen=True)
class Point:
    """A moment of a curve: Unix seconds, the step, the launch, and the least, median and most over the ranks."""

    time: float
    step: int
    launch: int
    least: float
    median: float
    most: float


def stalls(launches: Sequence[Launch]) -> list[Point]:
    """How long each save held up training, in seconds."""
    return [
        Point(save.ended, save.step, number, min(save.stalls), statistics.median(save.stalls), max(save.stalls))
        for number, launch in enumerate(launches)
        for save in launch.saves
    ]


def bandwidths(launches: Sequence[Launch]) -> list[Point]:
    """How fast each step was protected, in bytes per second and rank."""
    points = []
    for number, launch in enumerate(launches):
        rates: dict[int, list[float]] = {}
        when: dict[int, float] = {}
        for event in _protects(launch):
            rates.setdefault(event.step, []).append(event.nbytes / event.seconds)
            when[event.step] = event.time
        points += [
            Point(when[step], step, number, min(those), statistics.median(those), max(those))
            for step, those in rates.items()
        ]
    return points


def bandwidth(launches: Sequence[Launch]) -> float:
    """All bytes that were protected over all the seconds that took: bytes per second and rank."""
    done = [event for launch in launches for event in _protects(launch)]
    return sum(event.nbytes for event in done) / sum(event.seconds for event in done) if done else 0.0


def _protects(launch: Launch) -> Iterable[Event]:
    return (e for e in launch.events if e.kind == "protect" and e.nbytes > 0 and e.seconds > 0)


def newest_commit(launches: Sequence[Launch]) -> Committed | None:
    """The checkpoint that was committed last, of the largest generation."""
    commits = [commit for launch in launches for commit in launch.commits]
    return max(commits, key=lambda commit: (commit.generation, commit.time), default=None)


@dataclasses.dataclass(frozen=True)
class Drains:
    """What was drained to the directory.

    Attributes:
        count, failed: steps.
        nbytes: that all ranks wrote.
        seconds: of a drain, on average.
        newest: the newest step; None: there is none.
        path: its folder.
    """

    count: int = 0
    failed: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    newest: int | None = None
    path: str = ""


def drains(launches: Sequence[Launch]) -> Drains:
    """Put together what the ranks tell about drains; one that failed on any rank has failed."""
    of: dict[tuple[int, int], list[Event]] = {}
    for number, launch in enumerate(launches):
        for event in launch.events:
            if event.kind == "drain":
                of.setdefault((number, event.step), []).append(event)
    good = {at: its for at, its in of.items() if not any(event.text("error") for event in its)}
    if not good:
        return Drains(failed=len(of))
    last = max(good.values(), key=lambda its: its[-1].time)[-1]
    took = statistics.fmean(max(event.seconds for event in its) for its in good.values())
    nbytes = sum(event.nbytes for its in good.values() for event in its)
    return Drains(len(good), len(of) - len(good), nbytes, took, last.step, last.text("path"))


@dataclasses.dataclass(frozen=True)
class Memory:
    """What the ranks of a node took of its memory: most at any time, at last, and in which launch that last was."""

    node: str
    peak_nbytes: int
    last_nbytes: int
    launch: int


def memory(launches: Sequence[Launch]) -> list[Memory]:
    """Sum up the memory of each node, in the order in which the nodes came. A launch tells all anew."""
    found: dict[str, Memory] = {}
    for number, launch in enumerate(launches):
        held: dict[str, dict[int, int]] = {}
        taken: dict[str, int] = {}
        for event in launch.events:
            if event.kind != "memory":
                continue
            ranks = held.setdefault(event.node, {})
            taken[event.node] = taken.get(event.node, 0) + event.nbytes - ranks.get(event.rank, 0)
            ranks[event.rank] = event.nbytes
            before = found.get(event.node)
            peak = max(taken[event.node], before.peak_nbytes if before else 0)
            found[event.node] = Memory(event.node, peak, taken[event.node], number)
    order = nodes_of(launches)
    return sorted(found.values(), key=lambda one: order[one.node])


@dataclasses.dataclass
class Remark:
    """Something that was logged for a person, as often as it was.

    Attributes:
        text, level: what was logged.
        count: how many times.
        first, last: when, Unix seconds.
        ranks: that said so.
    """

    text: str
    level: str
    count: int
    first: float
    last: float
    ranks: set[int]


def remarks(launches: Sequence[Launch]) -> list[Remark]:
    """Warnings, saves that were not committed and drains that failed; the same text once, the latest first."""
    found: dict[tuple[str, str], Remark] = {}
    for event in (event for launch in launches for event in launch.events):
        level, text = _remark(event)
        if text:
            one = found.setdefault((level, text), Remark(text, level, 0, event.time, event.time, set()))
            one.count, one.last = one.count + 1, event.time
            one.ranks.add(event.rank)
    return sorted(found.values(), key=lambda one: one.last, reverse=True)


def _remark(event: Event) -> tuple[str, str]:
    if event.kind == "warning":
        return event.text("level").upper() or "WARNING", event.text("text")
    if event.kind == "fail":
        return "WARNING", f"step {event.step} was not committed: {event.text('why') or 'the log has no reason'}"
    if event.kind == "drain" and event.text("error"):
        return "ERROR", f"step {event.step} was not drained: {event.text('error')}"
    return "", ""


def count_steps(launches: Sequence[Launch], kind: str) -> int:
    """How many steps of the launches have such an event, on any rank."""
    return len({(at, e.step) for at, launch in enumerate(launches) for e in launch.events if e.kind == kind})
