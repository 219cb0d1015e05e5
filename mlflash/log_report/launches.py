"""Events → launches, and the stretches of training in them. A launch is one run of all processes of a job.

All ranks save the same steps in the same order, so what the ranks tell of a step is put together here.
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
        step: of the training.
        began, ended: when the first rank called ``save``, when the last one got on with training.
        stall_s: of the rank that was held up longest.
        stalls: of each rank that told it, in seconds.
    """

    step: int
    began: float
    ended: float
    stall_s: float = 0.0
    stalls: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Committed:
    """A step that was committed: when the last rank knew it, how long that took since ``save``, in generation so."""

    step: int
    time: float
    seconds: float
    generation: int


@dataclasses.dataclass
class Stretch:
    """Training from a start or a restore to the next restore, or the end of the launch.

    Attributes:
        from_step: the step it went on from; None: nothing was restored.
        restores: rank → its restore of that step.
        ready: when training could go on, on all ranks.
        until: the last sign of it.
        saves, commits: by step, in the order of the saves.
        recovered: how it came that it began, where ranks were lost and the other processes stayed; else None.
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
        """Whether it is known that training went on."""
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
        run: its id.
        events: all of it, ordered by time.
        began, last: its first sign, and the last one of its training.
        started: what the lowest rank said at its start; None: that is missing.
        ranks: how many it had.
        nodes: their names, in order.
        places: rank → node, of the ranks that were heard of.
        signs: rank → when its training was heard of for the last time.
        ends: rank → "ended" or "failed", for the ranks that could say so.
        stretches: of training; at least one.
        followed: whether there is a later launch.
        nodes_before: nodes that it had before ranks were lost and replaced in place, in order; empty where none were.
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
        """Ranks that were heard of, and did not say that they end."""
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
        """Whether it is known that training went on."""
        return any(stretch.trained for stretch in self.stretches)


def launches(events: Iterable[Event]) -> list[Launch]:
    """Put events together to launches, ordered by their begin."""
    of: dict[str, list[Event]] = {}
    for event in events:
        of.setdefault(event.run, []).append(event)
    found = sorted((_launch(run, its) for run, its in of.items()), key=lambda launch: launch.began)
    for launch in found[:-1]:
        launch.followed = True
    return found


def nodes_of(launches: Iterable[Launch]) -> dict[str, int]:
    """Number the nodes of some launches, in the order in which they came."""
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
    """Divide a launch where its ranks restored. Each rank counts its own restores, so that clocks may differ."""
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
