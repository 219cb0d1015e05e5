"""What failures cost: where the time of a job went, the launches that failed, and the recoveries in place.

A save counts as kept if a later restore took its step or a newer one. Training after it, until the last event of its
launch, is lost. The dictionaries here are parts of the JSON document. All times are wall-clock seconds.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from .report_launches import Launch, Stretch
from .report_log import Event

_TOGETHER_S = 1.0  # ranks whose last events are within this time went silent together

Span = tuple[float, float]
"""Begin and end in Unix seconds."""


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


def failures(launches: Sequence[Launch], lost: Sequence[Span]) -> list[dict[str, Any]]:
    """Describe each launch that did not end by itself, and what the next launches restored.

    "newest" is the newest step that any rank had saved; "committed" the newest one that was committed or restored.
    """
    return [_failure(number, launches, lost) for number, launch in enumerate(launches)
            if launch.state in ("failed", "killed")]  # fmt: skip


def _failure(number: int, launches: Sequence[Launch], lost: Sequence[Span]) -> dict[str, Any]:
    launch, later = launches[number], launches[number + 1 :]
    following = later[0] if later else None
    back = next((stretch for launch in later for stretch in launch.stretches if stretch.is_training), None)
    restores = list({event.rank: event for event in back.events.of_kind("restore")}.values()) if back else []
    first_silent = _first_silent(launch)
    busy_nodes = {node for rank, node in launch.places.items() if rank not in first_silent}
    newest, committed = (launch.stretches[-1].newest(*kinds) for kinds in (("save", "commit"), ("commit",)))
    kept_nodes = {event.node for event in restores if _place(event) == "own node"}
    since = max((stretch.ready for stretch in launch.stretches if stretch.recovered), default=launch.began)
    is_at_work = following is not None and any(stretch.is_training for stretch in following.stretches)
    return {
        "launch": number, "time": launch.last, "state": launch.state, "silent": launch.silent,
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

    "times" leaves out what cannot be part of the recovery. A spare counts its wait from its own start, long before.
    """
    return [
        {
            "launch": number, "began": before.until, "ended": after.ready, "seconds": recovery.seconds,
            "round": recovery.round, "lost": sorted(set(recovery.lost)), "why": recovery.why, "step": recovery.step,
            "times": {phase: seconds for phase, seconds in recovery.times.items() if seconds <= recovery.seconds},
            "steps_lost": max(0, (before.newest("save", "commit") or 0) - recovery.step),
            "committed_lost": max(0, (before.newest("commit") or 0) - recovery.step),
            "lost_s": _within(lost, before.ready, before.until),
        }
        for number, launch in enumerate(launches)
        for before, after in itertools.pairwise(launch.stretches)
        if (recovery := after.recovered) is not None
    ]  # fmt: skip
