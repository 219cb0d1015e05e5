"""Group events to launches, and to the stretches of training in them. A launch is one run of all processes of a job.

All ranks save the same steps in the same order, so the events of all ranks about a step are joined here.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

from .journal import Recovered
from .read_logs import Event


@dataclasses.dataclass
class Saved:
    """A step that was saved, by all ranks together.

    Attributes:
        step: training step.
        began, ended: when the first rank called ``save``, and when the last rank continued training.
        stall_s: the longest stall of a rank.
        stalls: the stall of each rank that logged it, in seconds.
    """

    step: int
    began: float
    ended: float
    stall_s: float = 0.0
    stalls: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Committed:
    """A step that was committed.

    Attributes:
        step: training step.
        time: when the last rank knew of the commit, Unix seconds.
        seconds: time since ``save``.
        generation: number of the save.
    """

    step: int
    time: float
    seconds: float
    generation: int


@dataclasses.dataclass
class Stretch:
    """Training from a start or a restore to the next restore or the end of the launch.

    Attributes:
        from_step: the step that it continued from. None: nothing was restored.
        restores: rank → its restore of that step.
        ready: when training could continue on all ranks.
        until: its last event.
        saves, commits: saves and commits by step, in the order of the saves.
        recovered: the recovery that it began with, if ranks were lost and the other processes stayed; else None.
    """

    ready: float
    until: float
    from_step: int | None = None
    restores: dict[int, Event] = dataclasses.field(default_factory=dict)
    saves: dict[int, Saved] = dataclasses.field(default_factory=dict)
    commits: dict[int, Committed] = dataclasses.field(default_factory=dict)
    recovered: Recovered | None = None

    @property
    def trained(self) -> bool:
        """Whether the events show that training continued."""
        return bool(self.saves) or self.from_step is not None

    @property
    def newest(self) -> int | None:
        """The newest step that was saved, committed or restored; None: there is none."""
        return max([*self.saves, *self.commits, *self._from], default=None)

    @property
    def newest_committed(self) -> int | None:
        """The newest step that was committed or restored; None: there is none."""
        return max([*self.commits, *self._from], default=None)

    @property
    def _from(self) -> list[int]:
        return [] if self.from_step is None else [self.from_step]


@dataclasses.dataclass
class Launch:
    """One launch of a job.

    Attributes:
        run: its ID.
        events: all its events, ordered by time.
        began, last: its first event, and the last event of its training.
        started: the start event of the lowest rank. None: it is missing.
        ranks: number of ranks.
        nodes: names of the nodes, in order.
        places: rank → node, for ranks that logged events.
        signs: rank → time of the last event of its training.
        ends: rank → "ended" or "failed", for ranks that logged their end.
        stretches: stretches of training, at least one.
        followed: whether there is a later launch.
        nodes_before: nodes that it had before ranks were replaced in place, in order. Empty if none were.
    """

    run: str
    events: list[Event]
    began: float
    last: float
    started: Event | None
    ranks: int
    nodes: tuple[str, ...]
    places: dict[int, str]
    signs: dict[int, float]
    ends: dict[int, str]
    stretches: list[Stretch]
    followed: bool = False
    nodes_before: tuple[str, ...] = ()

    @property
    def silent(self) -> list[int]:
        """Ranks that logged events but no end."""
        return sorted(set(self.signs) - set(self.ends))

    @property
    def state(self) -> str:
        """How it ended: "ended", "failed" (by an exception), "killed" (ranks are silent), "open" (it may run)."""
        if not self.ends and not self.followed:
            return "open"
        if self.silent:
            return "killed"
        return "failed" if "failed" in self.ends.values() else "ended"

    @property
    def saves(self) -> Iterable[Saved]:
        """All saves."""
        return (save for stretch in self.stretches for save in stretch.saves.values())

    @property
    def commits(self) -> Iterable[Committed]:
        """All commits."""
        return (commit for stretch in self.stretches for commit in stretch.commits.values())

    @property
    def trained(self) -> bool:
        """Whether the events show that training continued."""
        return any(stretch.trained for stretch in self.stretches)


def launches(events: Iterable[Event]) -> list[Launch]:
    """Group events to launches, ordered by their begin."""
    of: dict[str, list[Event]] = {}
    for event in events:
        of.setdefault(event.run, []).append(event)
    found = sorted((_launch(run, its) for run, its in of.items()), key=lambda launch: launch.began)
    for launch in found[:-1]:
        launch.followed = True
    return found


def nodes_of(launches: Iterable[Launch]) -> dict[str, int]:
    """Number the nodes of some launches, in the order of their first use."""
    those = dict.fromkeys(node for launch in launches for node in (*launch.nodes_before, *launch.nodes))
    return {node: at for at, node in enumerate(those)}


def _launch(run: str, events: list[Event]) -> Launch:
    places: dict[int, str] = {}
    signs: dict[int, float] = {}
    ends: dict[int, str] = {}
    started: Event | None = None
    for event in events:
        places.setdefault(event.rank, event.node)
        if event.is_sign:
            signs[event.rank] = event.time
        if event.kind == "end":
            ends[event.rank] = "failed" if event.text("state") == "failed" else "ended"
        elif event.kind == "start" and (started is None or event.rank < started.rank):
            started = event
    told = () if started is None else started.texts("nodes")
    # A rank of a file that was written by hand may be on two nodes.
    nodes = tuple(dict.fromkeys([*told, *(places[rank] for rank in sorted(places)), *(one.node for one in events)]))
    ranks = max(0 if started is None else started.count("ranks"), len(places))
    began, last = min(event.began for event in events), max(signs.values(), default=events[-1].time)
    return Launch(run, events, began, last, started, ranks, nodes, places, signs, ends, _stretches(events, began, last))


def _stretches(events: list[Event], began: float, last: float) -> list[Stretch]:
    """Divide a launch at the restores of its ranks. Each rank counts its own restores, so clocks may differ."""
    found = [Stretch(began, last)]
    at: dict[int, int] = {}  # rank → its stretch
    saved: set[int] = set()  # ranks that saved in theirs
    for event in events:
        number = at.setdefault(event.rank, 0)
        if event.kind == "restore" and event.rank in saved:
            number = at[event.rank] = number + 1
            saved.discard(event.rank)
            if number == len(found):
                found.append(Stretch(event.time, last))
        elif event.kind == "save":
            saved.add(event.rank)
        _note(found[number], event)
    for before, after in itertools.pairwise(found):
        before.until = max(before.ready, min(event.began for event in after.restores.values()))
    return found


def _note(stretch: Stretch, event: Event) -> None:
    if event.kind == "restore":
        stretch.restores[event.rank] = event  # the newest, where it restored again before anything was saved
        stretch.from_step = event.step
        stretch.ready = max(stretch.ready, event.time)
    elif event.kind == "save":
        save = stretch.saves.setdefault(event.step, Saved(event.step, event.began, event.time))
        save.began, save.ended = min(save.began, event.began), max(save.ended, event.time)
        save.stall_s = max(save.stall_s, event.seconds)
        save.stalls.append(event.seconds)
    elif event.kind == "commit":
        found = Committed(event.step, event.time, event.seconds, event.count("generation"))
        known = stretch.commits.get(event.step, found)
        stretch.commits[event.step] = Committed(event.step, max(known.time, found.time),
                                                max(known.seconds, found.seconds), found.generation)  # fmt: skip
