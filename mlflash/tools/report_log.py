"""Events of ranks, and recoveries in the journal of ``mlflash run``, read from JSON lines and checked.

Contents of a file never raise an error: lines that are not events are counted. A killed process may leave half a line,
and the next process then appends to the same line. So a line that cannot be read is read again from the last place at
which an event may begin.
"""

from __future__ import annotations

import dataclasses
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
    "start", "save", "skip", "fail", "protect", "commit", "restore", "heal", "drain", "damage", "mend", "memory",
    "warning", "end", "suspect", "certified", "unrestorable", "uncaught",
]  # fmt: skip
_JOURNAL_KINDS = ("start", "end", "finish", "guard", "recovered", "host_back", "late")
_LINE_STARTS = (b'{"event":', b'{"time": ')  # of a rank, and of `mlflash run`


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


class Recovered(_Timed, kw_only=True, frozen=True):
    """A line of the journal, by the clock of `mlflash run`: ranks were lost, and in the same processes all train again.

    ``times`` has the seconds of each phase on the slowest rank.
    """

    seconds: Seconds
    round: Count
    lost: Annotated[tuple[Rank, ...], Meta(min_length=1)]
    step: Count
    why: str = ""
    times: Annotated[dict[str, Seconds], Meta(max_length=20)] = {}


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
    log.events.sort(key=lambda event: event.time)
    log.recovered.sort(key=lambda recovered: recovered.time)
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
    if isinstance(event, Event):
        file.events += 1
        log.events.append(event)
    elif event is None:
        file.foreign += 1
        file.first_foreign = file.first_foreign or file.lines
    else:
        file.journal += 1
        log.recovered += [event] if isinstance(event, Recovered) else []


def _decode(line: bytes) -> dict[str, Any] | None:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):  # also UnicodeDecodeError, and numbers with too many digits
        return None
    return document if isinstance(document, dict) else None


def _event(document: dict[str, Any]) -> Event | Recovered | Literal["other line of a journal"] | None:
    """Check the fields of a line; None if one is missing or not valid."""
    fields = {name: value for name, value in document.items() if value is not None}
    is_of_journal = fields.keys().isdisjoint(("run", "node")) and fields.get("event") in _JOURNAL_KINDS
    if is_of_journal and fields["event"] != "recovered":
        return "other line of a journal"
    try:
        return msgspec.convert(fields, Recovered if is_of_journal else Event)
    except (msgspec.ValidationError, UnicodeError):  # half of a surrogate pair, in a message about it
        return None
