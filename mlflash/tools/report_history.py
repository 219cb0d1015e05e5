"""The history of a job: all numbers of the page, which are the JSON document, and the launches for its drawings."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from ..text import listed, many
from .report_launches import CLOCKS_APART_S, Events, Launch, launches_of, steps_of, unique
from .report_log import Event, EventLog
from .report_losses import Span, failures, recoveries, time_spent


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
    failed, recovered = failures(launches, lost), recoveries(launches, lost)
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
        "failures": failed, "recoveries": recovered,
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
        yield (f"{many(len(left_out), 'line')} of the journal record replaced ranks (round "
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
