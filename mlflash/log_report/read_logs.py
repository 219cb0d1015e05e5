"""Read the events of event logs. Reading never stops: lines that are not events are counted and reported.

A killed process may leave half a line, and the next process then appends to the same line. So if a line cannot be read,
it is read again from the last place at which an event may begin.
"""

from __future__ import annotations

import dataclasses
import glob
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import journal
from .fields import LONGEST_TEXT, MOST_RANKS, number, text, whole

# The fields that each kind needs, in addition to those of every line.
_NEEDED = {
    "start": (), "save": ("step", "seconds"), "skip": ("step",), "fail": ("step",), "protect": ("step", "seconds"),
    "commit": ("step", "seconds"), "restore": ("step", "seconds"), "heal": ("step",), "drain": ("step", "seconds"),
    "damage": ("step",), "mend": ("step", "seconds"), "memory": ("nbytes",), "warning": (), "end": (),
    "suspect": ("step",), "certified": ("step",), "unrestorable": (), "uncaught": (),
}  # fmt: skip
_PLAIN = frozenset(("save", "protect", "memory"))  # the most frequent kinds: their other fields are dropped
_COURIERS: Mapping[str, Any] = {"by": "courier"}
_BEGINS = (b'{"event":', b'{"time": ')  # of a line of a rank, and of `mlflash run`
_UNKNOWN_KINDS = 20  # that are named


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """An event on a rank.

    Attributes:
        kind: "save", "commit", ...
        time: when it ended, Unix seconds, by the clock of its node.
        run: ID of the launch.
        rank, node: the rank and its node.
        seconds: how long it took; 0 if unknown.
        step: training step; -1 without a step.
        nbytes: number of bytes; 0 if unknown.
        more: the other fields, as they were read.
    """

    kind: str
    time: float
    run: str
    rank: int
    node: str
    seconds: float
    step: int
    nbytes: int
    more: Mapping[str, Any]

    @property
    def began(self) -> float:
        """When it began, Unix seconds."""
        return self.time - self.seconds

    @property
    def is_sign(self) -> bool:
        """Whether it shows that training is alive. A courier that is its own process may continue without it."""
        return self.more.get("by") != "courier"

    def text(self, name: str) -> str:
        """Return a field as text; "" if it is missing or null."""
        return text(self.more.get(name))

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a field that is a list as texts; empty if it is not a list."""
        found = self.more.get(name)
        return tuple(str(one)[:LONGEST_TEXT] for one in found) if isinstance(found, list) else ()

    def count(self, name: str) -> int:
        """Return a field that is a whole number; 0 if it is not."""
        found = self.more.get(name)
        return found if type(found) is int and 0 <= found < 1 << 63 else 0


@dataclasses.dataclass
class File:
    """What was read from a file.

    Attributes:
        path: path of the file.
        lines, events: number of lines and events.
        journal: number of lines that `mlflash run` has written.
        torn: number of lines that stop in the middle, as happens when a process is killed.
        foreign: number of lines that are not events that this version knows.
        first_foreign: number of the first such line; 0: there is none.
    """

    path: str
    lines: int = 0
    events: int = 0
    torn: int = 0
    foreign: int = 0
    first_foreign: int = 0
    journal: int = 0


@dataclasses.dataclass
class Log:
    """All files together.

    Attributes:
        files: files in the order of reading.
        events: events ordered by time. Events of one rank at the same time keep their order in the file.
        unknown: kinds of events that this version does not know → number, for the first few kinds.
        recovered, late: events in a journal of `mlflash run`, ordered by time.
    """

    files: list[File]
    events: list[Event]
    unknown: dict[str, int]
    recovered: list[journal.Recovered] = dataclasses.field(default_factory=list)
    late: list[journal.Late] = dataclasses.field(default_factory=list)


def files_of(paths: Sequence[str]) -> list[Path]:
    """Find the files of all nodes from the names of some, each once; see `event_log`. Not collective.

    Example:
        ``run.jsonl`` stands for run.jsonl, run.node1.jsonl, run.node2.jsonl and so on.
    """
    found: dict[str, Path] = {}
    for path in paths:
        stem, suffix = os.path.splitext(path)
        others = glob.glob(f"{glob.escape(stem)}.node[0-9]*{glob.escape(suffix)}")
        numbered = sorted((int(number), name) for name in others
                          if (number := name[len(stem) + 5 : len(name) - len(suffix)]).isdecimal())  # fmt: skip
        for name in [path, *(name for _, name in numbered)]:
            found.setdefault(os.path.realpath(name), Path(name))
    return list(found.values())


def read(paths: Iterable[Path]) -> Log:
    """Read event logs, and journals of `mlflash run` among them. Not collective.

    Raises:
        OSError: a file cannot be read. Its contents never raise an error.
    """
    log = Log([], [], {})
    for path in paths:
        file = File(str(path))
        with open(path, "rb") as lines:
            for line in lines:
                file.lines += 1
                _take(line, file, log)
        log.files.append(file)
    log.events.sort(key=lambda event: event.time)
    log.recovered.sort(key=lambda one: one.time)
    log.late.sort(key=lambda one: one.time)
    return log


def _take(line: bytes, file: File, log: Log) -> None:
    """Add the event of a line to the log, or count why there is none."""
    document = _parse(line)
    if document is None:
        begin = max(line.rfind(one) for one in _BEGINS)
        torn = begin > 0 or (begin == 0 and not line.endswith(b"\n")) or any(one.startswith(line) for one in _BEGINS)
        document = _parse(line[begin:]) if begin > 0 else None
        file.torn += torn
        if torn and document is None:
            return
    if document is not None and _has_event(document, file, log):
        return
    file.foreign += 1
    file.first_foreign = file.first_foreign or file.lines
    kind = None if document is None or journal.is_of_journal(document) else document.get("event")
    if isinstance(kind, str) and kind not in _NEEDED and (kind in log.unknown or len(log.unknown) < _UNKNOWN_KINDS):
        log.unknown[kind[:40]] = log.unknown.get(kind[:40], 0) + 1


def _has_event(document: dict[str, Any], file: File, log: Log) -> bool:
    """Add the event of a line to the log. Return False if it has no valid event."""
    if journal.is_of_journal(document):
        match journal.understand(document):
            case journal.Recovered() as recovered:
                log.recovered.append(recovered)
            case journal.Late() as late:
                log.late.append(late)
            case False:
                return False
        file.journal += 1
        return True
    event = _understand(document)
    if event is not None:
        file.events += 1
        log.events.append(event)
    return event is not None


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):  # also UnicodeDecodeError, and numbers with too many digits
        return None
    return document if isinstance(document, dict) else None


def _understand(document: dict[str, Any]) -> Event | None:
    """Make an event from a document. None if a field is missing or not valid."""
    kind, run, node = document.get("event"), document.get("run"), document.get("node")
    if not (isinstance(kind, str) and isinstance(run, str) and isinstance(node, str)):
        return None
    needed = _NEEDED.get(kind)
    if needed is None or any(document.get(name) is None for name in needed):
        return None
    time, seconds = number(document.get("time")), number(document.get("seconds", 0))
    rank = whole(document.get("rank"), MOST_RANKS)
    step, nbytes = whole(document.get("step", -1), 1 << 63, -1), whole(document.get("nbytes", 0), 1 << 63)
    if time is None or seconds is None or rank is None or step is None or nbytes is None or seconds > time:
        return None
    seconds = round(seconds, 9)  # less than a nanosecond becomes 0, which nothing divides by
    intern = sys.intern
    more = document if kind not in _PLAIN else _COURIERS if document.get("by") == "courier" else {}
    return Event(intern(kind), time, intern(run[:80]), rank, intern(node[:200]), seconds, step, nbytes, more)
