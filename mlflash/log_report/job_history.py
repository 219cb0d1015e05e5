"""The history of a job from its event logs: all data of the page and of the JSON document."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from ..human_readable.wording import many
from . import log_statistics
from .advice import Advice, advise
from .failures import Failure, failures
from .journal import Recovered
from .launches import Committed, Launch, launches
from .log_statistics import Drains, Memory, Point, Remark, Spread
from .read_logs import Event, Log
from .recoveries import Recovery, joined, late_remarks, recoveries
from .time_accounting import Account, Lost, account
from .waits import Waited, waited_for

_SKEW_S = 1.0  # clocks that differ by more get a note
_NAMED = 5  # rounds


@dataclasses.dataclass(frozen=True)
class JobHistory:
    """The history of a job.

    Attributes:
        log: the log that it was read from.
        launches: launches, ordered by their begin.
        account, lost: where the time went, and which training was lost.
        failures: launches that did not end by themselves.
        recoveries: lost ranks that were replaced while the other processes stayed.
        stall, commit: times of each save on its slowest rank, in seconds.
        stalls, bandwidths: curves over time.
        bandwidth: bytes per second and rank of protection.
        failed, skipped: number of steps whose save failed or was skipped.
        newest: the checkpoint that was committed last.
        waited_for: ranks that commits waited for.
        drains, memory, remarks: see `log_statistics`.
        advice: how often to save.
        notes: what a reader must know about the log itself.
    """

    log: Log
    launches: list[Launch]
    account: Account
    lost: list[Lost]
    failures: list[Failure]
    recoveries: list[Recovery]
    stall: Spread
    commit: Spread
    stalls: list[Point]
    bandwidths: list[Point]
    bandwidth: float
    failed: int
    skipped: int
    newest: Committed | None
    waited_for: list[Waited]
    drains: Drains
    memory: list[Memory]
    remarks: list[Remark]
    advice: Advice
    notes: list[str]

    @property
    def began(self) -> float:
        """The first event, Unix seconds."""
        return self.launches[0].began

    @property
    def ended(self) -> float:
        """The last event, Unix seconds."""
        return max(launch.events[-1].time for launch in self.launches)

    @property
    def steps_lost(self) -> int:
        """Steps that were saved or committed before a failure or a recovery, and not restored after it."""
        return sum(f.steps_lost for f in self.failures) + sum(r.steps_lost for r in self.recoveries)

    @property
    def committed_lost(self) -> int:
        """The committed steps among these. If there are any, more was lost than the redundancy covers."""
        return sum(f.committed_lost for f in self.failures) + sum(r.committed_lost for r in self.recoveries)

    @property
    def started(self) -> Event | None:
        """The start event of the newest launch that has one."""
        return next((launch.started for launch in reversed(self.launches) if launch.started is not None), None)

    @property
    def state(self) -> str:
        """How the newest launch ended; "open" if it is running, or if all its ranks were killed."""
        return self.launches[-1].state


def tell(log: Log, node_mtbf_s: float | None = None) -> JobHistory:
    """Make the history of a job. Not collective.

    Args:
        log: a log with at least one event.
        node_mtbf_s: mean time between failures of a node, for the interval. None: as measured.
    """
    its, left_out = joined(launches(log.events), log.recovered)
    accounted, lost = account(its)
    failed, in_place = failures(its, lost), recoveries(its, lost)
    remarks = [*log_statistics.remarks(its), *late_remarks(log.late)]
    stall = log_statistics.spread(save.stall_s for launch in its for save in launch.saves)
    commit = log_statistics.spread(commit.seconds for launch in its for commit in launch.commits)
    return JobHistory(
        log=log, launches=its, account=accounted, lost=lost, failures=failed, recoveries=in_place,
        stall=stall, commit=commit, stalls=log_statistics.stalls(its), bandwidths=log_statistics.bandwidths(its),
        bandwidth=log_statistics.bandwidth(its),
        failed=log_statistics.count_steps(its, "fail"), skipped=log_statistics.count_steps(its, "skip"),
        newest=log_statistics.newest_commit(its), waited_for=waited_for(its),
        drains=log_statistics.drains(its), memory=log_statistics.memory(its),
        remarks=sorted(remarks, key=lambda one: one.last, reverse=True), notes=_notes(log, its, left_out),
        advice=advise(its, failed, in_place, accounted.wall_s, stall, commit, node_mtbf_s),
    )  # fmt: skip


def _notes(log: Log, its: Sequence[Launch], left_out: Sequence[Recovered]) -> list[str]:
    """Note what may make the numbers wrong: missing files, clocks, unreadable lines."""
    notes = []
    for number, launch in enumerate(its, 1):
        missing = launch.ranks - len(launch.places)
        if missing > 0:
            notes.append(f"launch {number}: {missing} of {launch.ranks} ranks have no event: give the files of all "
                         "nodes")  # fmt: skip
    jobs = {launch.started.text("job") for launch in its if launch.started is not None}
    if len(jobs) > 1:
        names = ", ".join(sorted(jobs))
        notes.append(f"these are the logs of {len(jobs)} jobs, treated as one job: {names}")
    for node, ahead_s in _skews(its).items():
        way = "ahead of" if ahead_s > 0 else "behind"
        notes.append(f"the commits show that the clock of {node} is {abs(ahead_s):.1f} s {way} that of "
                     f"{its[0].nodes[0]}")  # fmt: skip
    if left_out:
        which = ", ".join(str(line.round) for line in left_out[:_NAMED])
        notes.append(f"{many(len(left_out), 'line')} of the journal record replaced ranks (round {which}), but no log "
                     "of a rank begins then: give all files, and check the clocks")  # fmt: skip
    torn, foreign = sum(file.torn for file in log.files), sum(file.foreign for file in log.files)
    if torn:
        notes.append(f"{many(torn, 'line')} stopped in the middle, as happens when a process is killed")
    if foreign:
        first = next(file for file in log.files if file.foreign)
        kinds = f"; this version does not know these kinds: {', '.join(log.unknown)}" if log.unknown else ""
        notes.append(f"{many(foreign, 'line')} are not events (the first: {first.path}, line "
                     f"{first.first_foreign}) and were skipped{kinds}")  # fmt: skip
    return notes


def _skews(its: Sequence[Launch]) -> dict[str, float]:
    """Return nodes whose clocks differ much from that of the first node, in seconds. All ranks commit together."""
    apart: dict[str, list[float]] = {}
    for launch in its:
        when: dict[int, dict[str, float]] = {}
        for event in launch.events:
            if event.kind == "commit":
                when.setdefault(event.step, {}).setdefault(event.node, event.time)
        for of in when.values():
            if its[0].nodes[0] in of:
                for node, time in of.items():
                    apart.setdefault(node, []).append(time - of[its[0].nodes[0]])
    skews = {node: statistics.median(those) for node, those in apart.items()}
    return {node: ahead_s for node, ahead_s in skews.items() if abs(ahead_s) > _SKEW_S}


def to_json(story: JobHistory) -> dict[str, Any]:
    """Return all numbers of a history as plain values: bytes, seconds, shares, Unix seconds."""
    started, account, newest = story.started, story.account, story.newest
    launch = story.launches[-1]
    return {
        "job": None if started is None else started.text("job"),
        "version": None if started is None else started.text("version"),
        "ranks": launch.ranks,
        "nodes": list(launch.nodes),
        "redundancy": None if started is None else started.text("redundancy"),
        "survives": None if started is None else started.text("survives"),
        "transport": None if started is None else started.text("transport"),
        "courier": None if started is None else started.text("courier"),
        "began": story.began,
        "ended": story.ended,
        "state": story.state,
        "goodput": account.goodput,
        "seconds": {"wall_s": account.wall_s, **dataclasses.asdict(account)},
        "steps_lost": story.steps_lost,
        "committed_steps_lost": story.committed_lost,
        "launches": [_launch_to_json(launch) for launch in story.launches],
        "failures": [_failure_to_json(failure) for failure in story.failures],
        "recoveries": [_recovery_to_json(recovery) for recovery in story.recoveries],
        "stall_s": dataclasses.asdict(story.stall),
        "commit_s": dataclasses.asdict(story.commit),
        "commits": story.commit.count,
        "saves_failed": story.failed,
        "saves_skipped": story.skipped,
        "protect_nbytes_per_s_and_rank": story.bandwidth,
        "newest": None if newest is None else dataclasses.asdict(newest),
        "waited_for": [dataclasses.asdict(one) for one in story.waited_for],
        "drains": dataclasses.asdict(story.drains),
        "memory": [{"node": one.node, "peak_nbytes": one.peak_nbytes, "last_nbytes": one.last_nbytes}
                   for one in story.memory],
        "interval": _advice_to_json(story.advice),
        "warnings": [{"level": one.level, "text": one.text, "count": one.count, "first": one.first, "last": one.last,
                      "ranks": sorted(one.ranks)} for one in story.remarks],
        "notes": story.notes,
        "files": [dataclasses.asdict(file) for file in story.log.files],
    }  # fmt: skip


def _launch_to_json(launch: Launch) -> dict[str, Any]:
    stretch = launch.stretches[0]
    return {
        "run": launch.run, "began": launch.began, "last": launch.last, "state": launch.state, "ranks": launch.ranks,
        "nodes": list(launch.nodes), "restored": stretch.from_step, "newest": launch.stretches[-1].newest,
        "saves": sum(1 for _ in launch.saves), "commits": sum(1 for _ in launch.commits),
    }  # fmt: skip


def _failure_to_json(failure: Failure) -> dict[str, Any]:
    return {field.name: value if not isinstance(value := getattr(failure, field.name), tuple) else list(value)
            for field in dataclasses.fields(failure)}  # fmt: skip


def _recovery_to_json(recovery: Recovery) -> dict[str, Any]:
    line = recovery.line
    return {
        "launch": recovery.launch, "began": recovery.began, "ended": recovery.ended, "seconds": line.seconds,
        "round": line.round, "lost": list(line.lost), "why": line.why, "step": line.step, "times": line.parts,
        "steps_lost": recovery.steps_lost, "committed_lost": recovery.committed_lost, "lost_s": recovery.lost_s,
    }  # fmt: skip


def _advice_to_json(advice: Advice) -> dict[str, Any]:
    given = dataclasses.asdict(advice)
    costs = given.pop("costs")
    return {name: costs[name] for name in ("mtbf_s", "stall_s", "commit_s", "restart_s")} | given | {
        "best_steps": advice.best_steps
    }  # fmt: skip
