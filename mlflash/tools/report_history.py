"""The history of a job: all numbers of the page, which are the JSON document, and the launches for its drawings.

A save counts as kept if a later restore took its step or a newer one. Training after it, until the last event of its
launch, is lost. The dictionaries here are parts of the JSON document. All times are wall-clock seconds.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from ..text import listed, many
from .report_log import (
    CLOCKS_APART_S,
    Cause,
    Event,
    EventLog,
    Events,
    Launch,
    RunEnd,
    Stretch,
    launches_of,
    steps_of,
    unique,
)

_TOGETHER_S = 1.0  # ranks whose last events are within this time went silent together
Span = tuple[float, float]
"""Begin and end in Unix seconds."""


@dataclasses.dataclass(frozen=True)
class JobHistory:
    """The history of a job. ``numbers`` is the JSON document: bytes, seconds, shares, Unix seconds."""

    launches: list[Launch]
    lost: list[Span]
    numbers: dict[str, Any]


def job_history(log: EventLog) -> JobHistory:
    """Make the history of a job from a log with at least one event."""
    launches = launches_of(log.events, log.recovered)
    newest_launch, commits = launches[-1], steps_of(launches, "commit")
    started = next((launch.started for launch in reversed(launches) if launch.started is not None), None)
    spent, lost = time_spent(launches)
    wall_s = sum(spent.values())
    failed, in_place = failures(launches, lost, log.ends), recoveries(launches, lost)
    recovered = [row for row in in_place if row["lost"]]
    numbers = {
        **{name: getattr(started, name, None) for name in ("job", "version")},
        "ranks": newest_launch.ranks, "nodes": newest_launch.nodes,
        **{name: getattr(started, name, None) for name in ("redundancy", "survives", "transport", "courier")},
        "began": launches[0].began, "ended": max(launch.events.ended for launch in launches),
        "state": newest_launch.state, "goodput": spent["kept_s"] / wall_s if wall_s else 0.0,
        "seconds": {"wall_s": wall_s, **spent},
        "steps_lost": sum(row["steps_lost"] for row in failed + recovered),
        "committed_steps_lost": sum(row["committed_lost"] for row in failed + recovered),
        "launches": [
            {"run": launch.events[0].run, "began": launch.began, "last": launch.last, "state": launch.state,
             "ranks": launch.ranks, "nodes": launch.nodes, "restored": launch.stretches[0].from_step,
             "newest": launch.stretches[-1].newest("save", "commit"), "saves": len(steps_of([launch], "save")),
             "commits": len(steps_of([launch], "commit"))}
            for launch in launches
        ],
        "failures": failed, "recoveries": recovered, "moves": [row for row in in_place if not row["lost"]],
        "hangs": [{"time": hang.time, "seconds": hang.seconds, "round": hang.round, "ranks": [hang.rank],
                   "node": hang.host, "why": hang.why, "others": list(hang.others)} for hang in log.hangs],
        "stall_s": spread(save.seconds for save in steps_of(launches, "save")),
        "commit_s": spread(commit.seconds for commit in commits), "commits": len(commits),
        "saves_failed": sum(len(launch.events.by_step("fail")) for launch in launches),
        "saves_skipped": sum(len(launch.events.by_step("skip")) for launch in launches),
        "protect_nbytes_per_s_and_rank": _bandwidth(launches), "newest": _newest(commits),
        "waited_for": _waited_for(launches), "drains": _drains(launches), "memory": _memory(launches),
        "warnings": _warnings(log.events), "notes": list(_notes(log, launches)),
        "files": [dataclasses.asdict(file) for file in log.files],
    }  # fmt: skip
    return JobHistory(launches, lost, numbers)


def spread(values: Iterable[float]) -> dict[str, float]:
    """Summarize values; all is 0 if there are none. The 95th percentile is one of the values."""
    ordered = sorted(values)
    if not ordered:
        return {"count": 0, "mean": 0.0, "median": 0.0, "p95": 0.0, "most": 0.0}
    p95 = ordered[math.ceil(0.95 * len(ordered)) - 1]
    return {"count": len(ordered), "mean": statistics.fmean(ordered), "median": statistics.median(ordered), "p95": p95,
            "most": ordered[-1]}  # fmt: skip


def _bandwidth(launches: Iterable[Launch]) -> float:
    """Divide all protected bytes by the seconds that it took. Without peers, a rank only computed checksums."""
    protects = [event for launch in launches for event in launch.events.of_kind("protect") if event.peers]
    seconds = sum(event.seconds for event in protects)
    return sum(event.nbytes for event in protects) / seconds if seconds > 1e-9 else 0.0


def _newest(commits: Iterable[Events]) -> dict[str, Any] | None:
    newest = max(commits, key=lambda commit: (commit[-1].generation, commit.ended), default=None)
    if newest is None:
        return None
    return {"step": newest[-1].step, "time": newest.ended, "seconds": newest.seconds,
            "generation": newest[-1].generation}  # fmt: skip


def _waited_for(launches: Iterable[Launch]) -> list[dict[str, Any]]:
    """List the ranks that commits waited for, by phase of saving, those first that delayed commits most in total."""
    waits: dict[tuple[int, str, str], list[Event]] = {}
    for launch in launches:
        for event in launch.events.of_kind("commit"):
            if event.slowest is not None:
                place = event.slowest, launch.places.get(event.slowest, ""), event.late_in
                waits.setdefault(place, []).append(event)
    return [
        {"rank": rank, "node": node, "phase": phase, "commits": len(events),
         "median_s": statistics.median(event.late_s for event in events),
         "most_s": max(event.late_s for event in events), "step": events[-1].step}
        for (rank, node, phase), events in sorted(waits.items(), key=lambda item: -sum(e.late_s for e in item[1]))
    ]  # fmt: skip


def _drains(launches: Iterable[Launch]) -> dict[str, Any]:
    """Summarize the drains to the directory. A drain that failed on any rank has failed."""
    drains = [drain for launch in launches for drain in launch.events.by_step("drain").values()]
    good = [drain for drain in drains if not any(event.error for event in drain)]
    newest = max((drain[-1] for drain in good), key=lambda event: event.time, default=None)
    return {
        "count": len(good), "failed": len(drains) - len(good), "nbytes": sum(drain.nbytes for drain in good),
        "seconds": statistics.fmean(drain.seconds for drain in good) if good else 0.0,
        "newest": newest and newest.step, "path": newest.path if newest else "",
    }  # fmt: skip


def _memory(launches: Sequence[Launch]) -> list[dict[str, Any]]:
    """Sum up the memory of the ranks of each node, in the order of their first use. Each launch logs all of it."""
    rows: dict[str, dict[str, Any]] = {}
    for launch in launches:
        held: dict[str, dict[int, int]] = {}
        for event in launch.events.of_kind("memory"):
            held.setdefault(event.node, {})[event.rank] = event.nbytes
            nbytes, peak_nbytes = sum(held[event.node].values()), rows.get(event.node, {}).get("peak_nbytes", 0)
            rows[event.node] = {"node": event.node, "peak_nbytes": max(nbytes, peak_nbytes), "last_nbytes": nbytes}
    nodes = unique(node for launch in launches for round_ in launch.rounds for node in round_.nodes)
    return [rows[node] for node in nodes if node in rows]


def _warnings(events: Iterable[Event]) -> list[dict[str, Any]]:
    """List warnings, saves that were not committed and drains that failed. Each text once, the latest first."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for event in events:
        if event.kind == "warning":
            level, text = event.level.upper() or "WARNING", event.text
        elif event.kind == "fail":
            level, text = "WARNING", f"step {event.step} was not committed: {event.why or 'the log has no reason'}"
        elif event.kind == "drain" and event.error:
            level, text = "ERROR", f"step {event.step} was not drained: {event.error}"
        else:
            continue
        row = rows.setdefault((level, text), {"level": level, "text": text, "count": 0, "first": event.time,
                                              "last": event.time, "ranks": []})  # fmt: skip
        row |= {"count": row["count"] + 1, "last": event.time, "ranks": sorted({*row["ranks"], event.rank})}
    return sorted(rows.values(), key=lambda row: -row["last"])


def _notes(log: EventLog, launches: Sequence[Launch]) -> Iterable[str]:
    """Note what may make the numbers wrong: missing files, clocks, unreadable lines."""
    for number, launch in enumerate(launches, 1):
        if (missing := launch.ranks - len(launch.places)) > 0:
            yield f"launch {number}: {missing} of {launch.ranks} ranks have no event: give the files of all nodes"
    jobs = sorted({launch.started.job for launch in launches if launch.started is not None})
    if len(jobs) > 1:
        yield f"these are the logs of {len(jobs)} jobs, treated as one job: {', '.join(jobs)}"
    yield from _clocks_apart(launches)
    known = [stretch.recovered for launch in launches for stretch in launch.stretches]
    if left_out := [line for line in log.recovered if line not in known]:
        yield (f"{many(len(left_out), 'line')} of the journal record replaced or moved ranks (round "
               f"{listed([str(line.round) for line in left_out])}), but no log of a rank begins then: give all files, "
               "and check the clocks")  # fmt: skip
    if torn := sum(file.torn for file in log.files):
        yield f"{many(torn, 'line')} stopped in the middle, as happens when a process is killed"
    if foreign := sum(file.foreign for file in log.files):
        first = next(file for file in log.files if file.foreign)
        yield f"no event in {many(foreign, 'line')} (the first: {first.path}, line {first.first_foreign})"


def _clocks_apart(launches: Sequence[Launch]) -> Iterable[str]:
    """Note the nodes whose clocks differ much from that of the first node. All ranks commit together."""
    first = launches[0].nodes[0]
    ahead_s: dict[str, list[float]] = {}
    for commit in steps_of(launches, "commit"):
        times = {event.node: event.time for event in reversed(commit)}
        for node in times if first in times else ():
            ahead_s.setdefault(node, []).append(times[node] - times[first])
    for node, seconds in ahead_s.items():
        if abs(apart_s := statistics.median(seconds)) > CLOCKS_APART_S:
            way = "ahead of" if apart_s > 0 else "behind"
            yield f"the commits show that the clock of {node} is {abs(apart_s):.1f} s {way} that of {first}"


# What failures cost


def time_spent(launches: Sequence[Launch]) -> tuple[dict[str, float], list[Span]]:
    """Divide all the time by its use; return also the spans of lost training."""
    spent = dict.fromkeys(("kept_s", "stall_s", "lost_s", "starting_s", "recovering_s", "down_s"), 0.0)
    lost: list[Span] = []
    for before, after in itertools.pairwise(launches):
        spent["down_s"] += max(0.0, after.began - before.last)
    kept_until = _kept_until(launches)
    for launch in launches:
        at = launch.began
        for stretch in launch.stretches:
            is_training = stretch.is_training or launch is launches[0]
            ready = min(max(at, stretch.ready), stretch.until) if is_training else stretch.until
            end = min(max(ready, kept_until[id(stretch)]), stretch.until)
            stall_s = min(end - ready, sum(save.seconds for save in stretch.saves.values() if save.ended <= end))
            spent["starting_s" if stretch.recovered is None else "recovering_s"] += ready - at
            spent["stall_s"] += stall_s
            spent["kept_s"] += end - ready - stall_s
            spent["lost_s"] += stretch.until - end
            if stretch.until > end:
                lost.append((end, stretch.until))
            at = stretch.until
    return spent, lost


def _kept_until(launches: Sequence[Launch]) -> dict[int, float]:
    """Return until when the training of each stretch was kept, by the id of the stretch."""
    kept: dict[int, float] = {}
    limit = math.inf  # later restores dropped all earlier steps above this one
    for stretch in (stretch for launch in reversed(launches) for stretch in reversed(launch.stretches)):
        ends = [save.ended for step, save in stretch.saves.items() if step <= limit]
        kept[id(stretch)] = stretch.until if limit == math.inf else max(ends, default=stretch.ready)
        if stretch.is_training:
            limit = min(limit, -math.inf if stretch.from_step is None else stretch.from_step)
    return kept


def failures(launches: Sequence[Launch], lost: Sequence[Span], ends: Sequence[RunEnd]) -> list[dict[str, Any]]:
    """Describe each launch that did not end by itself, and what the next launches restored.

    "newest" is the newest step that any rank had saved; "committed" the newest one that was committed or restored. Only
    the journal has the cause.
    """
    return [_failure(number, launches, lost, ends) for number, launch in enumerate(launches)
            if launch.state in ("failed", "killed")]  # fmt: skip


def _failure(number: int, launches: Sequence[Launch], lost: Sequence[Span], ends: Sequence[RunEnd]) -> dict[str, Any]:
    launch, later = launches[number], launches[number + 1 :]
    following = later[0] if later else None
    back = next((stretch for launch in later for stretch in launch.stretches if stretch.is_training), None)
    restores = list({event.rank: event for event in back.events.of_kind("restore")}.values()) if back else []
    first_silent = _first_silent(launch)
    busy_nodes = {node for rank, node in launch.places.items() if rank not in first_silent}
    newest, committed = (launch.stretches[-1].newest(*kinds) for kinds in (("save", "commit"), ("commit",)))
    kept_nodes = {event.node for event in restores if _place(event) == "own node"}
    since = max((stretch.ready for stretch in launch.stretches if stretch.recovered), default=launch.began)
    until = math.inf if following is None else following.began + CLOCKS_APART_S
    end = next((end for end in ends if launch.last - CLOCKS_APART_S <= end.time <= until and end.why), None)
    is_at_work = following is not None and any(stretch.is_training for stretch in following.stretches)
    return {
        "launch": number, "time": launch.last, "state": launch.state, "silent": launch.silent,
        **_cause(None if end is None else end.cause, "" if end is None else end.why),
        "first_silent": first_silent,
        "first_nodes": [node for node in launch.nodes if node in launch.places.values() and node not in busy_nodes],
        "gone": [] if following is None else [node for node in launch.nodes if node not in following.nodes],
        "new": [] if following is None else [node for node in following.nodes if node not in launch.nodes],
        "emptied": sorted({event.node for event in restores if event.node in launch.nodes} - kept_nodes),
        "newest": newest, "committed": committed,
        "restored": back and back.from_step, "went_on": back is not None,
        "source": max((event.source for event in restores), key=lambda source: source != "memory", default=""),
        "places": dict(Counter(map(_place, restores)).most_common()),
        "steps_lost": _steps_lost(newest, back), "committed_lost": _steps_lost(committed, back),
        "lost_s": _within(lost, since, launch.last),
        "down_s": 0.0 if following is None else max(0.0, following.began - launch.last),
        "recovery_s": following.stretches[0].ready - following.began if following and is_at_work else 0.0,
    }  # fmt: skip


def _cause(cause: Cause | None, why: str) -> dict[str, Any]:
    """Say why something failed: the kind of the cause, what failed, and what shows it."""
    if cause is None:
        return {"kind": "", "why": why, "evidence": ""}
    where = "" if cause.rank is None else f"rank {cause.rank}{f' on {cause.host}' if cause.host else ''}: "
    return {"kind": cause.kind, "why": f"{where}{cause.text or why}", "evidence": cause.evidence}


def _steps_lost(step: int | None, back: Stretch | None) -> int:
    """Return the number of steps from the one that training continued from to a newer one."""
    return 0 if step is None or back is None else max(0, step - (back.from_step or 0))


def _within(lost: Sequence[Span], began: float, ended: float) -> float:
    """Return the seconds of lost training between two moments."""
    return sum(end - begin for begin, end in lost if began <= begin and end <= ended)


def _first_silent(launch: Launch) -> list[int]:
    """Return the ranks that went silent before the others; none if all went together.

    All ranks save and commit together. So a rank that misses the newest save or commit of others, while they still
    logged events, was gone.
    """
    if launch.ends:
        return launch.silent
    missed: set[int] = set()
    for kind in ("save", "commit"):
        newest = {event.rank: event.time for event in launch.events.of_kind(kind)}
        early = [time for time in newest.values() if time < launch.last - _TOGETHER_S]
        if early:
            missed |= {rank for rank in launch.silent if newest.get(rank, 0.0) < max(early) - _TOGETHER_S}
    return sorted(missed) if len(missed) < len(launch.silent) else []


def _place(event: Event) -> str:
    """Say where a rank found its state."""
    if event.source != "memory":
        return event.source or "unknown"
    if event.from_node in ("", event.node):
        return "own node"
    return event.from_node if event.from_node in ("parity", "other ranks") else f"memory of {event.from_node}"


def recoveries(launches: Sequence[Launch], lost: Sequence[Span]) -> list[dict[str, Any]]:
    """Describe each recovery in place, ordered by time: ranks were lost and replaced in a launch that continued.

    Moves are among them, without lost ranks.

    "times" leaves out what cannot be part of the recovery. A spare counts its wait from its own start, long before.
    """
    return [
        {
            "launch": number, "began": before.until, "ended": after.ready, "seconds": recovery.seconds,
            "round": recovery.round, "lost": sorted(set(recovery.lost)), **_cause(recovery.cause, recovery.why),
            "step": recovery.step, "ranks": recovery.ranks,
            "times": {phase: seconds for phase, seconds in recovery.times.items() if seconds <= recovery.seconds},
            "steps_lost": max(0, (before.newest("save", "commit") or 0) - recovery.step),
            "committed_lost": max(0, (before.newest("commit") or 0) - recovery.step),
            "lost_s": _within(lost, before.ready, before.until),
        }
        for number, launch in enumerate(launches)
        for before, after in itertools.pairwise(launch.stretches)
        if (recovery := after.recovered) is not None
    ]  # fmt: skip
