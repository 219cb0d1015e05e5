"""What happens to this rank, told to all who want to know: by its trainer, and by its courier.

counts, seconds     `Checkpointer.report`
heartbeat           `mlflash run`, `mlflash top`, metrics: from outside, on this node
events              the file that ``log=`` names
log                 one INFO line for each checkpoint, restore and drain, on rank 0

Each of the two tells what it knows by itself, and goes on where the other is dead.
"""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import MlflashError
from .event_log import EventLog
from .heartbeat import CourierHeartbeat, TrainerHeartbeat
from .lateness import PHASES, Lateness, Riding, Stragglers, is_worth_a_word
from .prometheus_metrics import Metrics

log = logging.getLogger("mlflash")

_LETTERS = 300  # of the reason why nothing can be restored; log and event have all of it
_TRACE = 20_000  # last letters of a traceback


class _Tally:
    """What happened to one process of a rank."""

    def __init__(self, rank: int):
        self._rank = rank
        self.counts: collections.Counter[str] = collections.Counter()
        self.seconds: dict[str, float] = collections.defaultdict(float)

    def _tell(self, text: str, *values: object) -> None:
        if self._rank == 0:
            log.info(text, *values)


class TrainerRecorder(_Tally):
    """What the trainer of one rank knows; not collective.

    Args:
        rank: of the world.
        heartbeat, events: told what happens.
        metrics: shown by this rank for all of its node; None: another rank shows them, or none does.
        courier_is_thread: whether the courier is a thread of this process, and calls `flush`.

    Attributes:
        counts: what happened, by name.
        seconds: seconds per operation, by name.
    """

    def __init__(self, rank: int, heartbeat: TrainerHeartbeat, events: EventLog, metrics: Metrics | None = None,
                 courier_is_thread: bool = True):  # fmt: skip
        super().__init__(rank)
        self._heartbeat, self._events, self._metrics = heartbeat, events, metrics
        self._courier_is_thread = courier_is_thread
        self._warned_late = False

    def started(self, facts: Mapping[str, Any], survives: Callable[[], str]) -> None:
        """Report what this run is like. To compute what it survives takes time, so only rank 0 does that."""
        self._heartbeat.beat("made", redundancy=facts["redundancy"], nodes=len(facts["nodes"]))
        if self._events.is_on:
            self._events.add("start", **facts, survives=survives() if self._rank == 0 else "")

    def posting(self, step: int) -> None:
        """Note that a save will be posted next. It writes, so call it before the courier needs the GIL."""
        self._heartbeat.beat("saved", saved=step)

    def saved(self, step: int, stall_s: float, nbytes: int, lazy: bool, staged: bool) -> None:
        """Note that `save` returns now; ``staged`` says whether anything was staged."""
        self.counts["saves"] += 1
        self.counts["bytes staged"] += nbytes
        self.seconds["stall"] += stall_s
        self._heartbeat.note(stall_s=stall_s, stalled_s=self.seconds["stall"], nbytes=nbytes)
        if not self._courier_is_thread:
            self.flush()
        if staged:
            self._events.add("save", step=step, seconds=stall_s, nbytes=nbytes, lazy=lazy)

    def flush(self) -> None:
        """Have the heartbeat write what was noted; a courier that is a thread does so while training continues."""
        self._heartbeat.flush()

    def late(self, step: int, error: MlflashError) -> None:
        """A save takes longer than the deadline."""
        self.counts["late"] += 1
        if not self._warned_late:
            self._warned_late = True
            log.warning("step %d is late, and steps are not saved until it has caught up: %s", step, error)

    def caught_up(self) -> None:
        """Note that a save has ended that did not fail: the next one that is late is logged again."""
        self._warned_late = False

    def uncaught(self, text: str) -> None:
        """An error of mlflash leaves the training's ``with`` block: note its traceback, which is not printed whole."""
        self._events.add("uncaught", text=text[-_TRACE:])

    def courier_died(self, pid: int, how: str) -> None:
        """Note that the courier of this rank died, and that training continues.

        Args:
            pid: of the courier.
            how: how it ended, in words.
        """
        self.counts["couriers lost"] += 1
        log.warning("the courier of rank %d (pid %d) died, and training goes on: %s", self._rank, pid, how)

    def restored(self, step: int, seconds: float, source: str, node: str, nbytes: int, how: str = "") -> None:
        """A step was loaded: ``source`` is "memory" or a folder of the directory."""
        self.counts["restores"] += 1
        self._heartbeat.beat("restored", restored=step, source=source, restored_at=time.time())
        self._events.add("restore", step=step, seconds=seconds, nbytes=nbytes, source=source, **{"from": node})
        self._tell("restored step %d from %s in %.3g s%s", step, source, seconds, how)

    def together(self, counts: Mapping[str, int], seconds: Mapping[str, float]
                 ) -> tuple[dict[str, int], dict[str, float]]:  # fmt: skip
        """Return counts and seconds of this rank: these, and those of its courier."""
        all_counts, all_seconds = collections.Counter(self.counts), dict(self.seconds)
        all_counts.update(counts)
        for verb, taken in seconds.items():
            all_seconds[verb] = all_seconds.get(verb, 0.0) + taken
        return dict(all_counts), all_seconds

    def end(self, state: str) -> None:
        """Report the end: "ended", or "failed". May be called twice; the first one counts."""
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
    """What the courier of one rank knows; not collective.

    Args:
        rank: of the world.
        heartbeat, events: told what happens; if the courier is a thread, the events are the trainer's.
        flush: writes what the trainer in the same process has noted; None: the courier is a separate process.

    Attributes:
        flush: see above; the trainer in the same process sets it.
        events: see above.
        counts: what happened, by name.
        seconds: seconds per operation, by name.
    """

    def __init__(self, rank: int, heartbeat: CourierHeartbeat, events: EventLog,
                 flush: Callable[[], None] | None = None):  # fmt: skip
        super().__init__(rank)
        self._heartbeat, self.events, self.flush = heartbeat, events, flush
        self._saves_before = int(heartbeat.before.get("saves") or 0)  # of the previous courier
        self._failed_before = int(heartbeat.before.get("failed") or 0)
        self._damaged_before = int(heartbeat.before.get("damaged") or 0)
        self._nbytes: int | None = None
        self._riding: Riding | None = None
        self._lateness: Lateness | None = None  # of the next commit
        self._stragglers = Stragglers()
        self._suspect = ""  # what was logged last

    def compare(self, size: int, generation: int, took: Mapping[str, float]) -> list[int]:
        """Return the numbers that are sent along with the agreement of a commit; see `lateness`.

        Args:
            size: of the world.
            generation: of the attempt.
            took: seconds of each phase on this rank.
        """
        self._riding = Riding(self._rank, size, generation, took)
        return self._riding.numbers

    def compared(self, least: Sequence[int], name_of: Callable[[int], str]) -> None:
        """Take the minimum of each of them over all ranks, before `committed`.

        Args:
            least: these minima.
            name_of: returns the node of a rank.
        """
        assert self._riding is not None
        self._lateness = self._riding.heard(least, name_of)

    def protected(self, step: int, seconds: float, nbytes: int, peers: Sequence[int]) -> None:
        """The redundancy of a slot is in place."""
        self._heartbeat.note(protect_s=seconds)
        self.events.add("protect", step=step, seconds=seconds, nbytes=nbytes, peers=list(peers))

    def committed(self, step: int, seconds: float, generation: int) -> None:
        """All ranks agree that a step is a checkpoint, so many seconds after the call of `save`."""
        self.counts["committed"] += 1
        late, self._lateness = self._lateness, None
        self._heartbeat.beat(
            "committed", committed=step, commit_s=seconds, saves=self._saves_before + self.counts["committed"],
            unrestorable="", **({} if late is None else _in_heartbeat(late)),
        )  # fmt: skip
        self._flush_trainer()
        waited: dict[str, Any] = {}
        if late is not None and self._rank == 0 and is_worth_a_word(late.slowest.seconds, seconds):
            waited = {"slowest": late.slowest.rank, "late_in": late.slowest.phase, "late_s": late.slowest.seconds}
        self.events.add("commit", step=step, seconds=seconds, generation=generation, **waited)
        self._tell("committed step %d, %.3g s after it was saved", step, seconds)
        if late is not None and self._rank == 0:
            self._warn_of_straggler(late, seconds)

    def _warn_of_straggler(self, lateness: Lateness, commit_s: float) -> None:
        """Warn about a rank that commits keep waiting for, once until that changes."""
        if (found := self._stragglers.add(lateness.slowest, commit_s)) is not None:
            log.warning("commits wait for rank %d on %s: compared with most ranks %s, by %.2g s in %d of the newest %d",
                        found.late.rank, lateness.node, PHASES[found.late.phase], found.late.seconds, found.times,
                        found.of)  # fmt: skip

    def skipped(self, step: int) -> None:
        """Note that all ranks skipped a save because the slots of one were busy."""
        self.counts["skipped"] += 1
        self.events.add("skip", step=step)

    def failed(self, step: int, error: MlflashError) -> None:
        """Note that a save was given up."""
        self.counts["failed"] += 1
        self._beat(failed=self._failed_before + self.counts["failed"])
        self.events.add("fail", step=step, why=str(error))
        if self._rank in (0, error.rank):
            log.warning("step %d was not saved: %s", step, error)

    def suspect(self, step: int, what: str, tensors: int) -> None:
        """Note that values that are saved are suspect on this rank.

        Args:
            step: the step that is saved.
            what: the findings, in words.
            tensors: how many.
        """
        self.counts["suspect"] += 1
        self._beat(suspect=step, suspect_tensors=tensors)
        self.events.add("suspect", step=step, tensors=tensors, what=what)
        if what != self._suspect:  # log it once, until it changes
            log.warning("step %d: values on rank %d are suspect: %s", step, self._rank, what)
        self._suspect = what

    def certified(self, step: int) -> None:
        """A step is certified."""
        self.counts["certified"] += 1
        self._beat(certified=step)
        self.events.add("certified", step=step)

    def unrestorable(self, error: MlflashError) -> None:
        """There are checkpoints, but none of them can be restored."""
        said = str(error)
        short = said[:_LETTERS].encode("ascii", "replace").decode()
        self._heartbeat.beat("unrestorable", unrestorable=short, unrestorable_at=time.time())
        self.events.add("unrestorable", why=said)

    def healed(self, step: int, seconds: float, made: bool) -> None:
        """The redundancy of the restored step was looked at, and made again where it was missing."""
        self.seconds["heal"] += seconds
        self.events.add("heal", step=step, seconds=seconds, made=made)

    def damaged(self, file: str, kind: str, step: int, of: int, block: int | None, text: str) -> None:
        """Note that something at rest that this rank holds is damaged.

        Args:
            file, kind: the file; "own", "copy", "parity", "share" or "drained".
            step, of: its step, and the rank whose state it is.
            block: the first bad block; None: not a single block.
            text: all of that in words, and what will happen.
        """
        self.counts["files damaged"] += 1
        self._beat(damaged=self._damaged_before + self.counts["files damaged"])
        self.events.add("damage", file=file, kind=kind, step=step, of=of, block=block)
        log.warning("%s", text)

    def mended(self, step: int, seconds: float, blocks: int, made: int, left: int) -> None:
        """Note that damage at rest was repaired, as far as that was possible.

        Args:
            step: step of what was repaired.
            seconds: how long that took.
            blocks: blocks that were repaired in this rank's own slot.
            made: copies and parity files that were made again here.
            left: files of this rank that are still damaged.
        """
        self.seconds["mend"] += seconds
        self.counts["files made again"] += made
        self.events.add("mend", step=step, seconds=seconds, blocks=blocks, made=made, left=left)

    def drained(self, step: int, seconds: float, nbytes: int, path: str, error: MlflashError | None) -> None:
        """A drain has ended."""
        self.counts["drained" if error is None else "drains failed"] += 1
        self.seconds["drain"] += seconds
        self._beat(**({"drained": step} if error is None else {}))
        self.events.add("drain", step=step, seconds=seconds, nbytes=nbytes, path=path,
                         error=None if error is None else str(error))  # fmt: skip

    def holds(self, nbytes: int) -> None:
        """So many bytes of this node's memory are this rank's."""
        if nbytes != self._nbytes:
            self._nbytes = nbytes
            self._beat(held=nbytes)
            self.events.add("memory", nbytes=nbytes)

    def end(self) -> None:
        """Report that the courier ends, and did not die. May be called twice."""
        self._heartbeat.end()
        self.events.close()

    def leave(self) -> None:
        """Report nothing in a forked process: heartbeat and events belong to the parent."""
        self._heartbeat.leave()
        self.events.leave()

    def _beat(self, **news: Any) -> None:
        self._heartbeat.beat(**news)
        self._flush_trainer()

    def _flush_trainer(self) -> None:
        if self.flush is not None:
            self.flush()


def _in_heartbeat(lateness: Lateness) -> dict[str, Any]:
    """What the heartbeat reports about the last commit: this rank, and the one that the commit waited for."""
    slowest, own = lateness.slowest, lateness.own
    return {"late_s": own.seconds, "late_in": own.phase, "slowest": slowest.rank, "slowest_on": lateness.node,
            "slowest_s": slowest.seconds, "slowest_in": slowest.phase}  # fmt: skip
