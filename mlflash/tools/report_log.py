"""Events of ranks, and recoveries in the journal of ``mlflash run``: read from JSON lines, and grouped to launches.

Contents of a file never raise an error: lines that are not events are counted. A killed process may leave half a line,
and the next process then appends to the same line. So a line that cannot be read is read again from the last place at
which an event may begin.

A launch is one run of all processes of a job. If ranks were lost and the other processes stayed, each round of
training has a run ID of its own. The journal says which runs continue each other: they are one launch, with a stretch
of training for each.
"""

from __future__ import annotations

import dataclasses
import functools
import glob
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

Seconds = Annotated[float, Meta(ge=0, lt=253_402_300_800)]  # before the year 10000, which datetime does not have
Rank = Annotated[int, Meta(ge=0, lt=10_000_000)]
Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
EventKind = Literal[
    "start", "save", "skip", "fail", "protect", "commit", "restore", "reprotect", "drain", "damage", "repair", "memory",
    "warning", "end", "suspect", "certified", "unrestorable", "uncaught", "recover",
]  # fmt: skip
_JOURNAL_KINDS = ("start", "end", "finish", "guard", "recovered", "moved", "hang", "host_back", "late")
_LINE_STARTS = (b'{"event":', b'{"time": ')  # of a rank, and of `mlflash run`
CLOCKS_APART_S = 1.0  # how far clocks may differ: those of nodes without a note, and that of `mlflash run` from theirs


class _Timed(msgspec.Struct, kw_only=True, frozen=True, rename={"kind": "event", "from_node": "from"}):
    """What ended at ``time``, in Unix seconds, after so many ``seconds``."""

    time: Seconds
    seconds: Seconds = 0.0

    @property
    def began(self) -> float:
        return max(0.0, self.time - self.seconds)


class Event(_Timed, kw_only=True, frozen=True):
    """An event of a rank, by the clock of its node. docs/watching.md says which kinds have which of these fields."""

    kind: EventKind
    run: str
    rank: Rank
    node: str
    step: Annotated[int, Meta(ge=-1, lt=1 << 62)] = -1
    nbytes: Count = 0
    generation: Count = 0
    by: str = ""
    job: str = ""
    version: str = ""
    ranks: Count = 0
    nodes: tuple[str, ...] = ()
    redundancy: str = ""
    survives: str = ""
    transport: str = ""
    courier: str = ""
    peers: tuple[Rank, ...] = ()
    source: str = ""
    from_node: str = ""
    slowest: Rank | None = None
    late_s: Seconds = 0.0
    late_in: str = ""
    path: str = ""
    state: str = ""
    level: str = ""
    text: str = ""
    why: str = ""
    error: str = ""

    @property
    def is_of_training(self) -> bool:
        """Whether it shows that training is alive. A courier may outlive its trainer."""
        return self.by != "courier"


class Cause(msgspec.Struct, frozen=True):
    """Why a rank or a launch failed; see `launch.cause.Cause`."""

    kind: str
    text: str = ""
    evidence: str = ""
    rank: Rank | None = None
    host: str = ""


class Recovered(_Timed, kw_only=True, frozen=True):
    """A line of the journal, by the clock of `mlflash run`: in the same processes all train again.

    Ranks were lost, or, if it is "moved", left a host or became more. ``times`` has the seconds of each phase on the
    slowest rank.
    """

    kind: Literal["recovered", "moved"]
    seconds: Seconds
    round: Count
    lost: tuple[Rank, ...]
    step: Count
    why: str = ""
    ranks: Count = 0
    cause: Cause | None = None
    times: Annotated[dict[str, Seconds], Meta(max_length=20)] = {}

    def __post_init__(self) -> None:
        if bool(self.lost) != (self.kind == "recovered"):
            raise ValueError("a recovery has lost ranks, and a move has none")


class Hang(_Timed, kw_only=True, frozen=True):
    """A line of the journal: a rank made no progress for so many seconds, and was killed."""

    kind: Literal["hang"]
    rank: Rank
    host: str = ""
    round: Count = 0
    why: str = ""
    others: tuple[str, ...] = ()


class RunEnd(_Timed, kw_only=True, frozen=True):
    """A line of the journal: a start of the ranks has ended. ``why`` is "" if it ended by itself."""

    kind: Literal["end"]
    why: str = ""
    cause: Cause | None = None


_JOURNAL_FORMS: dict[str, type[Recovered | Hang | RunEnd]] = {
    "recovered": Recovered, "moved": Recovered, "hang": Hang, "end": RunEnd,
}  # fmt: skip


@dataclasses.dataclass
class LogFile:
    """How many lines of a file were read as what. ``torn`` ones stop in the middle, ``foreign`` ones are no events."""

    path: str
    lines: int = 0
    events: int = 0
    torn: int = 0
    foreign: int = 0
    first_foreign: int = 0
    journal: int = 0


@dataclasses.dataclass
class EventLog:
    """All files together, ordered by time."""

    files: list[LogFile] = dataclasses.field(default_factory=list)
    events: list[Event] = dataclasses.field(default_factory=list)
    recovered: list[Recovered] = dataclasses.field(default_factory=list)
    hangs: list[Hang] = dataclasses.field(default_factory=list)
    ends: list[RunEnd] = dataclasses.field(default_factory=list)


def files_of(paths: Sequence[str]) -> list[Path]:
    """Find the files of all nodes, each once: ``run.jsonl`` also stands for run.node1.jsonl and so on."""
    files: dict[str, Path] = {}
    for path in paths:
        stem, suffix = os.path.splitext(path)
        names = glob.glob(f"{glob.escape(stem)}.node[0-9]*{glob.escape(suffix)}")
        numbers = [name[len(stem) + len(".node") : len(name) - len(suffix)] for name in names]
        numbers = sorted(filter(str.isdecimal, numbers), key=int)
        for name in (path, *(f"{stem}.node{number}{suffix}" for number in numbers)):
            files.setdefault(os.path.realpath(name), Path(name))
    return list(files.values())


def read(paths: Iterable[Path]) -> EventLog:
    """Read event logs, and journals of `mlflash run` among them."""
    log = EventLog()
    for path in paths:
        file = LogFile(str(path))
        with open(path, "rb") as lines:
            for line in lines:
                file.lines += 1
                _read_line(line, file, log)
        log.files.append(file)
    for events in (log.events, log.recovered, log.hangs, log.ends):
        events.sort(key=lambda event: event.time)
    return log


def _read_line(line: bytes, file: LogFile, log: EventLog) -> None:
    document = _decode(line)
    if document is None:
        start = max(map(line.rfind, _LINE_STARTS))
        is_torn = start >= 0 or not line.endswith(b"\n")
        document = _decode(line[start:]) if start > 0 else None
        file.torn += is_torn
        if is_torn and document is None:
            return
    event = _event(document or {})
    file.journal += event is not None and not isinstance(event, Event)
    match event:
        case None:
            file.foreign += 1
            file.first_foreign = file.first_foreign or file.lines
        case Event():
            file.events += 1
            log.events.append(event)
        case Recovered():
            log.recovered.append(event)
        case Hang():
            log.hangs.append(event)
        case RunEnd():
            log.ends.append(event)


def _decode(line: bytes) -> dict[str, Any] | None:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):  # also UnicodeDecodeError, and numbers with too many digits
        return None
    return document if isinstance(document, dict) else None


def _event(document: dict[str, Any]) -> Event | Recovered | Hang | RunEnd | Literal["other line of a journal"] | None:
    """Check the fields of a line; None if one is missing or not valid."""
    fields = {name: value for name, value in document.items() if value is not None}
    is_of_journal = fields.keys().isdisjoint(("run", "node")) and fields.get("event") in _JOURNAL_KINDS
    form = _JOURNAL_FORMS.get(fields["event"]) if is_of_journal else Event
    if form is None:
        return "other line of a journal"
    try:
        return msgspec.convert(fields, form)
    except (msgspec.ValidationError, UnicodeError):  # half of a surrogate pair, in a message about it
        return None


# Launches


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
