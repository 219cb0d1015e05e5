"""Statistics of the events: stalls, bandwidth, commits, drains, memory, warnings."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence

from .launches import Committed, Launch, nodes_of
from .read_logs import Event


@dataclasses.dataclass(frozen=True)
class Spread:
    """A summary of some numbers.

    Attributes:
        count: how many there are. If it is 0, the others are 0.
        mean, median, p95, most: mean, median, 95th percentile and maximum. The percentile is one of the numbers.
    """

    count: int = 0
    mean: float = 0.0
    median: float = 0.0
    p95: float = 0.0
    most: float = 0.0


def spread(numbers: Iterable[float]) -> Spread:
    """Summarize numbers."""
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
    """Return how long each save stalled training, in seconds."""
    return [
        Point(save.ended, save.step, number, min(save.stalls), statistics.median(save.stalls), max(save.stalls))
        for number, launch in enumerate(launches)
        for save in launch.saves
    ]


def bandwidths(launches: Sequence[Launch]) -> list[Point]:
    """Return how fast each step was protected, in bytes per second and rank."""
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
    """Divide all protected bytes by all the seconds that it took: bytes per second and rank."""
    done = [event for launch in launches for event in _protects(launch)]
    return sum(event.nbytes for event in done) / sum(event.seconds for event in done) if done else 0.0


def _protects(launch: Launch) -> Iterable[Event]:
    return (e for e in launch.events if e.kind == "protect" and e.nbytes > 0 and e.seconds > 0)


def newest_commit(launches: Sequence[Launch]) -> Committed | None:
    """Return the checkpoint that was committed last, which has the largest generation."""
    commits = [commit for launch in launches for commit in launch.commits]
    return max(commits, key=lambda commit: (commit.generation, commit.time), default=None)


@dataclasses.dataclass(frozen=True)
class Drains:
    """What was drained to the directory.

    Attributes:
        count, failed: number of drained and failed steps.
        nbytes: bytes that all ranks wrote.
        seconds: average time of a drain.
        newest: the newest drained step, or None.
        path: its folder.
    """

    count: int = 0
    failed: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    newest: int | None = None
    path: str = ""


def drains(launches: Sequence[Launch]) -> Drains:
    """Summarize the drains. A drain that failed on any rank has failed."""
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
    """The memory that the ranks of a node took: the most at any time, the last value, and the launch of that value."""

    node: str
    peak_nbytes: int
    last_nbytes: int
    launch: int


def memory(launches: Sequence[Launch]) -> list[Memory]:
    """Sum up the memory of each node, in the order of their first use. Each launch logs all its memory again."""
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
    """A warning or error in the log, with the number of times that it was logged.

    Attributes:
        text, level: the message and its level.
        count: how many times it was logged.
        first, last: when it was logged, Unix seconds.
        ranks: the ranks that logged it.
    """

    text: str
    level: str
    count: int
    first: float
    last: float
    ranks: set[int]


def remarks(launches: Sequence[Launch]) -> list[Remark]:
    """List warnings, saves that were not committed and drains that failed. Each text once, the latest first."""
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
    """Count the steps that have an event of this kind on any rank."""
    return len({(at, e.step) for at, launch in enumerate(launches) for e in launch.events if e.kind == kind})
