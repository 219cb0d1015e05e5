"""Launches of a job, and the stretches of training in them. A launch is one run of all processes of a job.

If ranks were lost and the other processes stayed, each round of training has a run ID of its own. The journal of
`mlflash run` says which runs continue each other: they are one launch, with a stretch of training for each.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence

from .report_log import Event, Recovered

CLOCKS_APART_S = 1.0  # how far clocks may differ: those of nodes without a note, and that of `mlflash run` from theirs


class Events(list[Event]):
    """Events of any ranks, ordered by time. The properties are of at least one event: ``seconds`` of the slowest."""

    @property
    def began(self) -> float:
        return min(event.began for event in self)

    @property
    def ended(self) -> float:
        return max(event.time for event in self)

    @property
    def seconds(self) -> float:
        return max(event.seconds for event in self)

    @property
    def nbytes(self) -> int:
        return sum(event.nbytes for event in self)

    @property
    def last_of_training(self) -> float:
        return max((event.time for event in self if event.is_of_training), default=self.ended)

    @property
    def started(self) -> Event | None:
        """The start event of the lowest rank."""
        return min(self.of_kind("start"), key=lambda event: event.rank, default=None)

    @property
    def nodes(self) -> list[str]:
        by_rank = sorted(self, key=lambda event: event.rank)
        return unique([*(self.started.nodes if self.started else ()), *(event.node for event in by_rank)])

    def of_kind(self, kind: str) -> Events:
        return Events(event for event in self if event.kind == kind)

    def by_step(self, kind: str) -> dict[int, Events]:
        """Join the events of all ranks about a step. All ranks save the same steps in the same order."""
        steps: dict[int, Events] = {}
        for event in self.of_kind(kind):
            steps.setdefault(event.step, Events()).append(event)
        return steps


@dataclasses.dataclass
class Stretch:
    """Training from a start or a restore to the next restore or the end of the launch."""

    events: Events
    ready: float  # when training could continue on all ranks, in Unix seconds
    until: float  # its last event
    from_step: int | None  # the step that it continued from
    recovered: Recovered | None = None  # the recovery in place that it began with

    @functools.cached_property
    def saves(self) -> dict[int, Events]:
        return self.events.by_step("save")

    @property
    def is_training(self) -> bool:
        """Whether its events show that training continued."""
        return bool(self.saves) or self.from_step is not None

    def newest(self, *kinds: str) -> int | None:
        """Return the newest step of some kinds of events, or the one that was restored."""
        steps = [event.step for event in self.events if event.kind in kinds]
        return max([*steps, *([] if self.from_step is None else [self.from_step])], default=None)


@dataclasses.dataclass
class Launch:
    """One launch of a job."""

    rounds: list[Events]  # one for each run ID
    stretches: list[Stretch]
    is_newest: bool = False

    @functools.cached_property
    def events(self) -> Events:
        return Events(sorted((event for round_ in self.rounds for event in round_), key=lambda event: event.time))

    @functools.cached_property
    def began(self) -> float:
        return self.events.began

    @functools.cached_property
    def last(self) -> float:
        """The last event of its training, in Unix seconds."""
        return max(self.rounds[-1].last_of_training, self.stretches[-1].until)

    @functools.cached_property
    def started(self) -> Event | None:
        """The start event of the lowest rank, in the newest round that has one."""
        return next((started for round_ in reversed(self.rounds) if (started := round_.started)), None)

    @functools.cached_property
    def places(self) -> dict[int, str]:
        """Rank → node, for ranks with events."""
        return {event.rank: event.node for event in self.events}

    @functools.cached_property
    def ranks(self) -> int:
        return max(self.started.ranks if self.started else 0, len(self.places))

    @functools.cached_property
    def nodes(self) -> list[str]:
        return self.rounds[-1].nodes

    @functools.cached_property
    def ends(self) -> dict[int, str]:
        """Rank → "ended" or "failed", for ranks that logged their end."""
        return {event.rank: "failed" if event.state == "failed" else "ended"
                for event in self.rounds[-1].of_kind("end")}  # fmt: skip

    @functools.cached_property
    def silent(self) -> list[int]:
        """Ranks that trained but logged no end."""
        return sorted({event.rank for event in self.events if event.is_of_training} - self.ends.keys())

    @property
    def state(self) -> str:
        """How it ended: "ended", "failed" (by an exception), "killed" (ranks are silent), "open" (it may run)."""
        if not self.ends and self.is_newest:
            return "open"
        return "killed" if self.silent else "failed" if "failed" in self.ends.values() else "ended"


def unique(names: Iterable[str]) -> list[str]:
    """Return each name once, in the order of the first ones."""
    return list(dict.fromkeys(names))


def steps_of(launches: Iterable[Launch], kind: str) -> list[Events]:
    """Return the events of each step that has this kind of event; a step counts again after a restore."""
    stretches = (stretch for launch in launches for stretch in launch.stretches)
    return [events for stretch in stretches for events in stretch.events.by_step(kind).values()]


def launches_of(events: Iterable[Event], recoveries: Sequence[Recovered]) -> list[Launch]:
    """Group events to launches, ordered by their begin. A run that began during a recovery continues a launch."""
    runs: dict[str, Events] = {}
    for event in events:
        runs.setdefault(event.run, Events()).append(event)
    launches: list[Launch] = []
    for run in sorted(runs.values(), key=lambda run: run.began):
        stretches = _stretches(run)
        recovery = next((recovery for recovery in recoveries if recovery.began - CLOCKS_APART_S <= run.began
                         <= recovery.time + CLOCKS_APART_S), None)  # fmt: skip
        if recovery is None or not launches:
            launches.append(Launch([run], stretches))
            continue
        launch = launches[-1]
        if launch.stretches[-1].recovered is recovery:
            launch.stretches.pop()  # this round failed before all of its ranks had begun
        _recover(launch.stretches[-1], stretches[0], recovery)
        launch.stretches += stretches
        launch.rounds.append(run)
    launches[-1].is_newest = True
    return launches


def _recover(before: Stretch, after: Stretch, recovery: Recovered) -> None:
    """Put a recovery between two stretches, the times of which are from other clocks."""
    before.until = min(max(recovery.began, before.ready), max(after.until, before.ready))
    after.ready = max(before.until, min(recovery.time, after.until))
    after.until = max(after.ready, after.until)
    after.from_step = recovery.step if after.from_step is None else after.from_step
    after.recovered = recovery


def _stretches(run: Events) -> list[Stretch]:
    """Divide a run at the restores of its ranks. Each rank counts its own restores, so clocks may differ."""
    parts = [Events()]
    part_of: dict[int, int] = {}  # rank → number of its part
    saved: set[int] = set()  # ranks that saved in their part
    for event in run:
        part_of.setdefault(event.rank, 0)
        if event.kind == "restore" and event.rank in saved:
            saved.discard(event.rank)
            part_of[event.rank] += 1
            if part_of[event.rank] == len(parts):
                parts.append(Events())
        elif event.kind == "save":
            saved.add(event.rank)
        parts[part_of[event.rank]].append(event)
    stretches: list[Stretch] = []
    for events in parts:
        restores = events.of_kind("restore")
        if stretches:
            stretches[-1].until = max(stretches[-1].ready, restores.began)
        ready = restores.ended if restores else run.began
        stretches.append(Stretch(events, ready, run.last_of_training, restores[-1].step if restores else None))
    return stretches
