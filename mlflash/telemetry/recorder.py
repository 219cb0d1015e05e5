"""What happens to this rank, told to all who want to know: by its trainer, and by its courier.

counts, seconds     `Checkpointer.report`
heartbeat           `mlflash run`, `mlflash top`, metrics: from outside, on this node
events              the file that ``log=`` names, and spans with ``metrics="otlp"``
log                 one INFO line for each checkpoint, restore and drain, on rank 0

Each of the two tells what it knows by itself, and goes on where the other is dead.
"""

from __future__ import annotations

import collections
import json
import logging
import math
import operator
import os
import queue
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import MlflashError
from .heartbeat import CourierHeartbeat, TrainerHeartbeat
from .metrics import Metrics
from .otlp import Exporter

log = logging.getLogger("mlflash")

FAILED_AT = "MLFLASH_FAILED_AT"
"""Environment name of when `mlflash run` noticed that the start before this one had failed, Unix time."""

_WAITING = 10_000  # events that may wait to be written; further ones are only counted
_CLOSE_S = 2.0  # to write the remaining events at the end
_LETTERS = 300  # of the reason why nothing can be restored; log and event have all of it
_TRACE = 20_000  # last letters of a traceback


class EventLog:
    """The events of this rank, as lines of JSON in a file (docs/watching.md) and as spans; not collective.

    A separate thread opens the file and writes: a parallel file system that hangs delays neither training nor saves.
    Every warning that is logged is an event, too, until `close`.

    Args:
        common: fields of each event: run, rank and node. ``by="courier"`` for a courier, whose warnings are also its
            trainer's.
    """

    def __init__(self, path: str | None, exporter: Exporter | None = None, **common: Any):
        self._path, self._exporter, self._common = path, exporter, common
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # in C: no exception leaves it locked
        self._dropped = 0
        self._thread: threading.Thread | None = None
        if path is not None:
            self._thread = threading.Thread(target=self._write, name="mlflash-events", daemon=True)
            self._thread.start()
            if "by" not in common:
                log.addFilter(self._see)

    @property
    def is_on(self) -> bool:
        return self._thread is not None or self._exporter is not None

    def add(self, event: str, **fields: Any) -> None:
        """Note an event that has just ended; return at once."""
        if not self.is_on:
            return
        document = {"event": event, "time": time.time(), **self._common, **fields}
        document = {name: round(value, 6) if isinstance(value, float) else value for name, value in document.items()}
        if self._exporter is not None:
            self._exporter.add(document)
        if self._thread is None:
            return
        if self._lines.qsize() < _WAITING:
            self._lines.put(json.dumps(document, separators=(",", ":"), default=str) + "\n")
        else:
            self._dropped += 1

    def close(self) -> None:
        exporter, self._exporter = self._exporter, None
        if exporter is not None:
            exporter.close()
        if self._thread is None:
            return
        log.removeFilter(self._see)
        self._lines.put(None)
        self._thread.join(_CLOSE_S)  # if the file system hangs, the thread ends with the process
        self._thread = None

    def leave(self) -> None:
        """Write nothing in a forked process: the thread belongs to the parent, and may hold the queue's lock."""
        log.removeFilter(self._see)
        if self._exporter is not None:
            self._exporter.leave()
        self._thread = self._exporter = None

    def _see(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            self.add("warning", level=record.levelname, text=record.getMessage())
        return True

    def _write(self) -> None:
        try:
            assert self._path is not None
            Path(self._path).parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                while (lines := self._next()) is not None:
                    _write_lines(fd, lines)
            finally:
                os.close(fd)
        except OSError as error:
            log.removeFilter(self._see)
            log.warning("events are not written any more, to %s: %s", self._path, error)

    def _next(self) -> bytes | None:
        lines = [self._lines.get()]
        while lines[-1] is not None and not self._lines.empty():
            lines.append(self._lines.get())
        if lines == [None]:
            return None
        if lines[-1] is None:
            self._lines.put(None)
        dropped, self._dropped = self._dropped, 0
        if dropped:
            text = f"{dropped} events are missing: they came faster than they could be written"
            self.add("warning", level="WARNING", text=text)
        return "".join(line for line in lines if line is not None).encode()


def _write_lines(fd: int, lines: bytes) -> None:
    """Write each line in one write, because ranks of one node, and their couriers, append to one file.

    If only a part was written, the line that was cut is written once more, whole: another process may have written in
    between.
    """
    while lines:
        written = os.write(fd, lines)
        line_end = lines.rfind(b"\n", 0, written) + 1
        # If a write does not even take one line, repeating that line never succeeds: continue with the rest of it.
        is_cut = 1 < line_end < written < len(lines) and lines[written : written + 1] != b"\n"
        lines = b"\n" + lines[line_end:] if is_cut else lines[written:]


def file_of_node(path: str, node_index: int) -> str:
    """Name the file of a node, ``run.node1.jsonl`` for the second: nodes must not append to one shared file."""
    stem, suffix = os.path.splitext(path)
    return path if node_index == 0 else f"{stem}.node{node_index}{suffix}"


class _Tally:
    def __init__(self, rank: int):
        self._rank = rank
        self.counts: collections.Counter[str] = collections.Counter()
        self.seconds: dict[str, float] = collections.defaultdict(float)

    def _info(self, text: str, *values: object) -> None:
        if self._rank == 0:
            log.info(text, *values)


class TrainerRecorder(_Tally):
    """What the trainer of one rank knows.

    ``metrics`` are those of its node; most ranks have none.
    """

    def __init__(self, rank: int, heartbeat: TrainerHeartbeat, events: EventLog, metrics: Metrics | None = None):
        super().__init__(rank)
        self._heartbeat, self._events, self._metrics = heartbeat, events, metrics
        self._warned_late = False

    def started(self, facts: Mapping[str, Any], survives: Callable[[], str]) -> None:
        self._heartbeat.beat("made", redundancy=facts["redundancy"], nodes=len(facts["nodes"]))
        if self._events.is_on:
            self._events.add("start", **facts, survives=survives() if self._rank == 0 else "")

    def posting(self, step: int) -> None:
        """Note that a save will be posted next. It writes, so call it before the courier needs the GIL."""
        self._heartbeat.beat("saved", saved=step)

    def saved(self, step: int, stall_s: float, nbytes: int, lazy: bool, staged: bool) -> None:
        self.counts["saves"] += 1
        self.counts["bytes staged"] += nbytes
        self.seconds["stall"] += stall_s
        self._heartbeat.note(stall_s=stall_s, stalled_s=self.seconds["stall"], nbytes=nbytes)
        self._heartbeat.flush()
        if staged:
            self._events.add("save", step=step, seconds=stall_s, nbytes=nbytes, lazy=lazy)

    def late(self, step: int, error: MlflashError) -> None:
        self.counts["late"] += 1
        if not self._warned_late:
            self._warned_late = True
            log.warning("step %d is late, and steps are not saved until it has caught up: %s", step, error)

    def caught_up(self) -> None:
        self._warned_late = False

    def uncaught(self, text: str) -> None:
        self._events.add("uncaught", text=text[-_TRACE:])

    def courier_died(self, pid: int, how: str) -> None:
        self.counts["couriers lost"] += 1
        log.warning("the courier of rank %d (pid %d) died, and training goes on: %s", self._rank, pid, how)

    def restored(self, step: int, seconds: float, source: str, node: str, nbytes: int, how: str = "") -> None:
        """A step was loaded: ``source`` is "memory" or a folder of the directory."""
        self.counts["restores"] += 1
        self._heartbeat.beat("restored", restored=step, source=source, restored_at=time.time())
        self._events.add("restore", step=step, seconds=seconds, nbytes=nbytes, source=source, **{"from": node})
        self._info("restored step %d from %s in %.3g s%s", step, source, seconds, how)
        if failed_at := os.environ.pop(FAILED_AT, ""):  # this is the first restore of this process
            self.recovered(step, max(0.0, time.time() - float(failed_at)))

    def recovered(self, step: int, seconds: float) -> None:
        """This rank trains again from a step, so many seconds after it or `mlflash run` learned of the failure."""
        self._events.add("recover", step=step, seconds=seconds)

    def merged(self, counts: Mapping[str, int], seconds: Mapping[str, float]
                 ) -> tuple[dict[str, int], dict[str, float]]:  # fmt: skip
        all_counts, all_seconds = collections.Counter(self.counts), dict(self.seconds)
        all_counts.update(counts)
        for verb, taken in seconds.items():
            all_seconds[verb] = all_seconds.get(verb, 0.0) + taken
        return dict(all_counts), all_seconds

    def end(self, state: str) -> None:
        if not self._heartbeat.is_over:
            self._events.add("end", state=state)
        self._heartbeat.end(state)
        self._events.close()
        if self._metrics is not None:
            self._metrics.close()

    def leave(self) -> None:
        """Report nothing in a forked process: heartbeat, events and metrics belong to the parent."""
        self._heartbeat.leave()
        self._events.leave()
        if self._metrics is not None:
            self._metrics.leave()
        self._metrics = None


class CourierRecorder(_Tally):
    """What the courier of one rank knows."""

    def __init__(self, rank: int, heartbeat: CourierHeartbeat, events: EventLog):
        super().__init__(rank)
        self._heartbeat, self.events = heartbeat, events
        # Those of the previous courier.
        self._before = {name: int(heartbeat.before.get(name) or 0) for name in ("saves", "failed", "damaged")}
        self._nbytes: int | None = None
        self._sample: PhaseSample | None = None
        self._lateness: Lateness | None = None  # of the next commit
        self._stragglers = Stragglers()
        self._suspect = ""  # what was logged last

    def compare(self, size: int, generation: int, phase_s: Mapping[str, float]) -> list[int]:
        """Return the numbers that are sent along with the agreement of a commit; see `PhaseSample`."""
        self._sample = PhaseSample(self._rank, size, generation, phase_s)
        return self._sample.numbers

    def compared(self, least: Sequence[int], name_of: Callable[[int], str]) -> None:
        """Take the minimum of each of them over all ranks, before `committed`."""
        assert self._sample is not None
        self._lateness = self._sample.merge(least, name_of)

    def protected(self, step: int, seconds: float, nbytes: int, peers: Sequence[int]) -> None:
        self._heartbeat.note(protect_s=seconds)
        self.events.add("protect", step=step, seconds=seconds, nbytes=nbytes, peers=list(peers))

    def committed(self, step: int, seconds: float, generation: int) -> None:
        """All ranks agree that a step is a checkpoint, so many seconds after the call of `save`."""
        self.counts["committed"] += 1
        late, self._lateness = self._lateness, None
        self._heartbeat.beat("committed", committed=step, commit_s=seconds, committed_at=time.time(), unrestorable="",
                             saves=self._before["saves"] + self.counts["committed"],
                             **({} if late is None else late.as_fields()))  # fmt: skip
        waited: dict[str, Any] = {}
        if late is not None and self._rank == 0 and is_notable(late.slowest.seconds, seconds):
            waited = {"slowest": late.slowest.rank, "late_in": late.slowest.phase, "late_s": late.slowest.seconds}
        self.events.add("commit", step=step, seconds=seconds, generation=generation, **waited)
        self._info("committed step %d, %.3g s after it was saved", step, seconds)
        if late is not None and self._rank == 0:
            self._warn_of_straggler(late, seconds)

    def _warn_of_straggler(self, lateness: Lateness, commit_s: float) -> None:
        if (straggler := self._stragglers.add(lateness.slowest, commit_s)) is not None:
            log.warning("commits wait for rank %d on %s: compared with most ranks %s, by %.2g s in %d of the newest %d",
                        straggler.late.rank, lateness.node, PHASES[straggler.late.phase], straggler.late.seconds,
                        straggler.times, straggler.of)  # fmt: skip

    def skipped(self, step: int) -> None:
        self.counts["skipped"] += 1
        self.events.add("skip", step=step)

    def failed(self, step: int, seconds: float, error: MlflashError) -> None:
        """A save became no checkpoint, so many seconds after its call."""
        self.counts["failed"] += 1
        self._heartbeat.beat(failed=self._before["failed"] + self.counts["failed"])
        self.events.add("fail", step=step, seconds=seconds, why=str(error))
        if self._rank in (0, error.rank):
            log.warning("step %d was not saved: %s", step, error)

    def suspect(self, step: int, what: str, tensors: int) -> None:
        self.counts["suspect"] += 1
        self._heartbeat.beat(suspect=step, suspect_tensors=tensors)
        self.events.add("suspect", step=step, tensors=tensors, what=what)
        if what != self._suspect:  # log it once, until it changes
            log.warning("step %d: values on rank %d are suspect: %s", step, self._rank, what)
        self._suspect = what

    def certified(self, step: int) -> None:
        self.counts["certified"] += 1
        self._heartbeat.beat(certified=step)
        self.events.add("certified", step=step)

    def unrestorable(self, error: MlflashError) -> None:
        text = str(error)
        short = text[:_LETTERS].encode("ascii", "replace").decode()
        self._heartbeat.beat("unrestorable", unrestorable=short, unrestorable_at=time.time())
        self.events.add("unrestorable", why=text)

    def reprotected(self, step: int, seconds: float, made: bool) -> None:
        self.seconds["reprotect"] += seconds
        self.events.add("reprotect", step=step, seconds=seconds, made=made)

    def damaged(self, file: str, kind: str, step: int, of: int, block: int | None, text: str) -> None:
        self.counts["files damaged"] += 1
        self._heartbeat.beat(damaged=self._before["damaged"] + self.counts["files damaged"])
        self.events.add("damage", file=file, kind=kind, step=step, of=of, block=block)
        log.warning("%s", text)

    def repaired(self, step: int, seconds: float, blocks: int, made: int, still_damaged: int) -> None:
        self.seconds["repair"] += seconds
        self.counts["files made again"] += made
        self.events.add("repair", step=step, seconds=seconds, blocks=blocks, made=made, left=still_damaged)

    def drained(self, step: int, seconds: float, nbytes: int, path: str, error: MlflashError | None) -> None:
        self.counts["drained" if error is None else "drains failed"] += 1
        self.seconds["drain"] += seconds
        news: dict[str, Any] = {"drained": step} if error is None else {}
        self._heartbeat.beat(**news)
        self.events.add("drain", step=step, seconds=seconds, nbytes=nbytes, path=path,
                         error=None if error is None else str(error))  # fmt: skip

    def holds(self, nbytes: int) -> None:
        if nbytes != self._nbytes:
            self._nbytes = nbytes
            self._heartbeat.beat(held=nbytes)
            self.events.add("memory", nbytes=nbytes)

    def end(self) -> None:
        self._heartbeat.end()
        self.events.close()


# How long each phase of a save takes on this rank → which rank a commit waits for, in which phase, for how long.
#
# `PhaseSample` finds it out, and `Stragglers` decides when it is worth a warning: not for the noise of a save, and once
# until it changes. It uses an allreduce that a commit makes anyway, which takes the minimum of each number. For each
# phase, every rank contributes its seconds and its rank in one number. In addition three ranks, different ones in each
# commit, contribute all their seconds, in place of a median over all ranks. Only durations are compared, because the
# clocks of nodes differ.

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

_SECONDS = operator.attrgetter("seconds")
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

    def as_fields(self) -> dict[str, Any]:
        return {"late_s": self.own.seconds, "late_in": self.own.phase, "slowest": self.slowest.rank,
                "slowest_on": self.node, "slowest_s": self.slowest.seconds,
                "slowest_in": self.slowest.phase}  # fmt: skip


class PhaseSample:
    """The numbers that are sent along with the agreement of one commit.

    Args:
        generation: of the attempt; it decides which ranks contribute all their seconds.
        phase_s: seconds of each phase on this rank. For "training": the seconds that it waited for others to come to
            this save, so the last one waits least.
    """

    def __init__(self, rank: int, size: int, generation: int, phase_s: Mapping[str, float]):
        self._rank, self._size, self._phase_s = rank, size, phase_s
        drawn = random.Random(generation).sample(range(size), min(3, size))
        codes = sum(_code(phase_s[phase]) << _CODE_BITS * at for at, phase in enumerate(PHASES))
        samples = [codes if rank == drawn_rank else _NOTHING for drawn_rank in drawn]
        slowest = [_packed(phase_s[phase], rank) * (1 if phase == "training" else -1) for phase in PHASES]
        self.numbers = [*slowest, *samples, *[_NOTHING] * (3 - len(samples))]
        """What this rank brings."""

    def merge(self, least: Sequence[int], name_of: Callable[[int], str]) -> Lateness | None:
        """Interpret the minimum of each number over all ranks; None if there is no other rank to compare with."""
        samples = [sample for sample in least[len(PHASES) :] if sample != _NOTHING]
        if not samples or self._size == 1:
            return None
        usual = {phase: _median([_decoded(sample, at) for sample in samples]) for at, phase in enumerate(PHASES)}
        # A rank that waits is on time.
        usual["training"] = -_median([-_decoded(sample, 0) for sample in samples])
        most = {phase: _unpacked(abs(number)) for phase, number in zip(PHASES, least, strict=False)}
        # A rank that is late at work makes others wait. Only waits beyond that are news.
        late_copy, late_deferred, late_checksums = (max(0.0, most[phase][0] - usual[phase]) for phase in _WORK)
        copied_late = max(late_copy, late_deferred)
        explained = {"training": copied_late, "transfer": max(copied_late, late_checksums)}

        def beyond(phase: str, seconds: float) -> float:
            late_s = usual[phase] - seconds if phase == "training" else seconds - usual[phase]
            return late_s - explained.get(phase, 0.0)

        slowest = max(
            (Late(rank, phase, beyond(phase, seconds)) for phase, (seconds, rank) in most.items()),
            key=operator.attrgetter("seconds"),
        )
        own = max(
            (Late(self._rank, phase, beyond(phase, self._phase_s[phase])) for phase in PHASES),
            key=operator.attrgetter("seconds"),
        )
        slowest, own = (late._replace(seconds=max(0.0, late.seconds)) for late in (slowest, own))
        return Lateness(slowest, own, name_of(slowest.rank))


def _microseconds(seconds: float) -> int:
    return min(max(0, round(seconds * 1e6)), _MOST_US - 1)


def _packed(seconds: float, rank: int) -> int:
    return _microseconds(seconds) << _RANK_BITS | rank


def _unpacked(number: int) -> tuple[float, int]:
    return (number >> _RANK_BITS) / 1e6, number & ((1 << _RANK_BITS) - 1)


def _code(seconds: float) -> int:
    return round(_CODES_PER_E * math.log(1 + _microseconds(seconds)))


def _median(values: Sequence[float]) -> float:
    """The median, or the lower one of two."""  # not of `statistics`, whose pages each courier would have
    return sorted(values)[(len(values) - 1) // 2]


def _decoded(sample: int, at: int) -> float:
    code = sample >> _CODE_BITS * at & ((1 << _CODE_BITS) - 1)
    return math.expm1(code / _CODES_PER_E) / 1e6


def is_notable(late_s: float, commit_s: float) -> bool:
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
        self._reported: dict[int, set[str]] = {}  # what was reported: rank → phases
        self._calm: dict[int, int] = {}  # for reported ranks: rank → commits since it was late

    def add(self, slowest: Late, commit_s: float) -> Straggler | None:
        """Add the slowest rank of one commit; return the straggler to report now."""
        late = slowest if is_notable(slowest.seconds, commit_s) else None
        self._newest.append(late)
        for rank in list(self._reported):
            self._calm[rank] = 0 if late is not None and late.rank == rank else self._calm[rank] + 1
            if self._calm[rank] >= _CALM:
                del self._reported[rank], self._calm[rank]
        if late is None or late.phase in self._reported.get(late.rank, ()):
            return None
        alike = [before.seconds for before in self._newest if before is not None and before[:2] == late[:2]]
        if len(alike) < _TIMES:
            return None
        self._reported.setdefault(late.rank, set()).add(late.phase)
        self._calm[late.rank] = 0
        return Straggler(late._replace(seconds=_median(alike)), len(alike), len(self._newest))
