"""What happens to this rank, told to all who want to know.

counts, seconds     `Checkpointer.report`
heartbeat           `mlflash run`, `mlflash top`, metrics: from outside, on this node
events              the file that ``log=`` names
log                 one INFO line for each checkpoint, restore and drain, on rank 0
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import MlflashError
from .event_log import EventLog
from .heartbeat import Heartbeat
from .prometheus_metrics import Metrics

log = logging.getLogger("mlflash")

_LETTERS = 300  # of why nothing can be restored, in the heartbeat; the log and the event have all of it


class Recorder:
    """Of one rank; not collective.

    Args:
        rank: of the world.
        heartbeat, events: told what happens.
        metrics: shown by this rank for all of its node; None: another one does, or none.

    Attributes:
        counts: what happened, by name.
        seconds: that verbs took, by name.
    """

    def __init__(self, rank: int, heartbeat: Heartbeat, events: EventLog, metrics: Metrics | None = None):
        self._rank, self._heartbeat, self._events, self._metrics = rank, heartbeat, events, metrics
        self._nbytes: int | None = None
        self._warned_late = False
        self.counts: collections.Counter[str] = collections.Counter()
        self.seconds: dict[str, float] = collections.defaultdict(float)

    def started(self, facts: Mapping[str, Any], survives: Callable[[], str]) -> None:
        """Say what this run is like; what it survives takes time to find out, and rank 0 is enough to do so."""
        self._heartbeat.beat("made", redundancy=facts["redundancy"], nodes=len(facts["nodes"]), saves=0, failed=0)
        if self._events.is_on:
            self._events.add("start", **facts, survives=survives() if self._rank == 0 else "")

    def posting(self, step: int) -> None:
        """A save is about to be posted; not after that, as this writes, and the courier would take the interpreter."""
        self._heartbeat.beat("saved", saved=step)

    def saved(self, step: int, stall_s: float, nbytes: int, lazy: bool, staged: bool) -> None:
        """`save` returns now; ``staged`` says whether there was anything to it."""
        self.counts["saves"] += 1
        self.counts["bytes staged"] += nbytes
        self.seconds["stall"] += stall_s
        self._heartbeat.note(stall_s=stall_s, stalled_s=self.seconds["stall"], nbytes=nbytes)
        if staged:
            self._events.add("save", step=step, seconds=stall_s, nbytes=nbytes, lazy=lazy)

    def protected(self, step: int, seconds: float, nbytes: int, peers: Sequence[int]) -> None:
        """The redundancy of a slot is in place."""
        self._heartbeat.note(protect_s=seconds)
        self._events.add("protect", step=step, seconds=seconds, nbytes=nbytes, peers=list(peers))

    def committed(self, step: int, seconds: float, generation: int) -> None:
        """All ranks agree that a step is a checkpoint, so many seconds after the call of `save`."""
        self.counts["committed"] += 1
        self._heartbeat.beat(
            "committed", committed=step, commit_s=seconds, saves=self.counts["committed"], unrestorable=""
        )
        self._events.add("commit", step=step, seconds=seconds, generation=generation)
        self._tell("committed step %d, %.3g s after it was saved", step, seconds)

    def ended(self, step: int, skipped: bool) -> None:
        """The courier is through with a save that did not fail."""
        self._warned_late = False
        if skipped:
            self.counts["skipped"] += 1
            self._events.add("skip", step=step)

    def failed(self, step: int, error: MlflashError) -> None:
        """A save was given up."""
        self.counts["failed"] += 1
        self._heartbeat.note(failed=self.counts["failed"])
        self._events.add("fail", step=step, why=str(error))
        if self._rank in (0, error.rank):
            log.warning("step %d was not saved: %s", step, error)

    def late(self, step: int, error: MlflashError) -> None:
        """A save takes longer than the deadline."""
        self.counts["late"] += 1
        if not self._warned_late:
            self._warned_late = True
            log.warning("step %d is late, and steps are not saved until it has caught up: %s", step, error)

    def restored(self, step: int, seconds: float, source: str, node: str, nbytes: int, how: str = "") -> None:
        """A step was loaded: ``source`` is "memory" or a folder of the directory."""
        self.counts["restores"] += 1
        self._heartbeat.beat("restored", restored=step, source=source, unrestorable="")
        self._events.add("restore", step=step, seconds=seconds, nbytes=nbytes, source=source, **{"from": node})
        self._tell("restored step %d from %s in %.3g s%s", step, source, seconds, how)

    def unrestorable(self, error: MlflashError) -> None:
        """Checkpoints are there, and none of them can be restored."""
        said = str(error)
        self._heartbeat.beat("unrestorable", unrestorable=said[:_LETTERS].encode("ascii", "replace").decode())
        self._events.add("unrestorable", why=said)

    def healed(self, step: int, seconds: float, made: bool) -> None:
        """The redundancy of the restored step was looked at, and made again where it was missing."""
        self.seconds["heal"] += seconds
        self._events.add("heal", step=step, seconds=seconds, made=made)

    def drained(self, step: int, seconds: float, nbytes: int, path: str, error: MlflashError | None) -> None:
        """A drain has ended."""
        self.counts["drained" if error is None else "drains failed"] += 1
        self.seconds["drain"] += seconds
        self._heartbeat.note(**({"drained": step} if error is None else {}))
        self._events.add("drain", step=step, seconds=seconds, nbytes=nbytes, path=path,
                         error=None if error is None else str(error))  # fmt: skip

    def holds(self, nbytes: int) -> None:
        """So many bytes of this node's memory are this rank's."""
        if nbytes != self._nbytes:
            self._nbytes = nbytes
            self._heartbeat.note(held=nbytes)
            self._events.add("memory", nbytes=nbytes)

    def end(self, state: str) -> None:
        """Say the last word: "ended", or "failed". May be called twice; the first one counts."""
        if not self._heartbeat.is_over:
            self._events.add("end", state=state)
        self._heartbeat.end(state)
        self._events.close()
        if self._metrics is not None:
            self._metrics.close()

    def leave(self) -> None:
        """Say nothing in a process that was forked: heartbeat, events and metrics are the parent's. Not collective."""
        self._heartbeat.leave()
        self._events.leave()
        if self._metrics is not None:
            self._metrics.leave()
        self._metrics = None

    def _tell(self, text: str, *values: object) -> None:
        if self._rank == 0:
            log.info(text, *values)
