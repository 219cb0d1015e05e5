"""Failures: launches that did not end by themselves, and what the next launches restored."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

from .launches import Launch, Stretch
from .read_logs import Event
from .time_accounting import Lost

_TOGETHER_S = 1.0  # ranks whose last events are within this time went silent together


@dataclasses.dataclass(frozen=True)
class Failure:
    """The end of a launch that did not end by itself.

    Attributes:
        launch: number of the launch, from 0 on.
        time: the last event of the launch, Unix seconds. The failure came after it.
        state: "failed": an exception ended it; "killed": some ranks or all logged no end.
        silent: ranks that logged no end.
        first_silent: ranks among these that logged nothing while others still did.
        first_nodes: nodes whose ranks are all in `first_silent`.
        gone, new: nodes that the next launch no longer had, and nodes that it had instead.
        emptied: nodes that it had again, but whose ranks found their state elsewhere, because their memory was lost.
        newest: the newest step that any rank had saved, or that was committed. None: there was none.
        committed: the newest step that was committed or restored. None: there was none.
        restored: the step that training continued from. None: it began from the start, or did not continue.
        went_on: whether training continued.
        source: "memory", or the folder that was restored; "" if nothing was restored.
        places: where ranks found their state → number of ranks.
        steps_lost: newest - restored. Training after the newest save is lost in addition.
        committed_lost: committed - restored. If this is not 0, more was lost than the redundancy covers.
        lost_s: seconds of lost training.
        down_s: seconds until the first event of the next launch.
        recovery_s: seconds from there until all ranks had restored.
    """

    launch: int
    time: float
    state: str
    silent: tuple[int, ...]
    first_silent: tuple[int, ...]
    first_nodes: tuple[str, ...]
    gone: tuple[str, ...]
    new: tuple[str, ...]
    emptied: tuple[str, ...]
    newest: int | None
    committed: int | None
    restored: int | None
    went_on: bool
    source: str
    places: Mapping[str, int]
    steps_lost: int
    committed_lost: int
    lost_s: float
    down_s: float
    recovery_s: float


def failures(launches: Sequence[Launch], lost: Sequence[Lost]) -> list[Failure]:
    """Find the failures. The last launch counts only if some ranks logged their end; otherwise it may be running."""
    found = []
    for number, launch in enumerate(launches):
        if launch.state in ("ended", "open"):
            continue
        found.append(_failure(number, launches, lost))
    return found


def _failure(number: int, launches: Sequence[Launch], lost: Sequence[Lost]) -> Failure:
    launch = launches[number]
    after = launches[number + 1] if number + 1 < len(launches) else None
    back = next((stretch for later in launches[number + 1 :] for stretch in later.stretches if stretch.trained), None)
    first = _first_silent(launch)
    since = max((one.ready for one in launch.stretches if one.recovered is not None), default=launch.began)
    nodes = [node for node in launch.nodes if (on := _ranks_on(launch, node)) and on <= set(first)]
    newest, committed = launch.stretches[-1].newest, launch.stretches[-1].newest_committed
    restored = None if back is None else back.from_step
    return Failure(
        launch=number, time=launch.last, state="failed" if launch.state == "failed" else "killed",
        silent=tuple(launch.silent), first_silent=first, first_nodes=tuple(nodes),
        gone=() if after is None else tuple(node for node in launch.nodes if node not in after.nodes),
        new=() if after is None else tuple(node for node in after.nodes if node not in launch.nodes),
        emptied=() if back is None else tuple(node for node in _emptied(back) if node in launch.nodes),
        newest=newest, committed=committed, restored=restored, went_on=back is not None,
        source=_source(back), places=_places(back),
        steps_lost=_lost(newest, back), committed_lost=_lost(committed, back),
        lost_s=sum(one.ended - one.began for one in lost if since <= one.began and one.ended <= launch.last),
        down_s=0.0 if after is None else max(0.0, after.began - launch.last),
        recovery_s=after.stretches[0].ready - after.began if after is not None and after.trained else 0.0,
    )  # fmt: skip


def _lost(step: int | None, back: Stretch | None) -> int:
    """Return the number of steps from the one that training continued from to a newer one."""
    return 0 if step is None or back is None else max(0, step - (back.from_step or 0))


def _ranks_on(launch: Launch, node: str) -> set[int]:
    return {rank for rank, place in launch.places.items() if place == node}


def _first_silent(launch: Launch) -> tuple[int, ...]:
    """Return the ranks that went silent before the others; none if all went together.

    All ranks save and commit together. So a rank that misses the newest save or commit of others, while they still
    logged events, was gone.
    """
    if launch.ends:
        return tuple(launch.silent)
    missed: set[int] = set()
    for kind in ("save", "commit"):
        newest: dict[int, Event] = {event.rank: event for event in launch.events if event.kind == kind}
        early = [event.time for event in newest.values() if event.time < launch.last - _TOGETHER_S]
        if not early:
            continue
        last = max(early)
        missed |= {rank for rank in launch.signs if rank not in newest or newest[rank].time < last - _TOGETHER_S}
    return tuple(sorted(missed)) if len(missed) < len(launch.signs) else ()


def _emptied(stretch: Stretch) -> list[str]:
    """Return the nodes on which no rank found its state in memory."""
    found: dict[str, bool] = {}
    for event in stretch.restores.values():
        here = event.text("source") == "memory" and event.text("from") in ("", event.node)
        found[event.node] = found.get(event.node, False) or here
    return sorted(node for node, any_here in found.items() if not any_here)


def _source(stretch: Stretch | None) -> str:
    """Return "memory" if all ranks found their state there, else the folder of the others."""
    sources = [] if stretch is None else [event.text("source") for event in stretch.restores.values()]
    return next((source for source in sources if source != "memory"), "memory" if sources else "")


def _places(stretch: Stretch | None) -> dict[str, int]:
    """Count where ranks found their state: own node, memory of another node, parity, other ranks, or a folder."""
    found: Counter[str] = Counter()
    for event in () if stretch is None else stretch.restores.values():
        source, place = event.text("source"), event.text("from")
        if source != "memory":
            place = source or "unknown"
        elif place in ("", event.node):
            place = "own node"
        elif place not in ("parity", "other ranks"):
            place = f"memory of {place}"
        found[place] += 1
    return dict(found.most_common())
