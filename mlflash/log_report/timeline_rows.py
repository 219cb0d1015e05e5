"""The rows of the timeline and their marks.

A row is a rank on a node. If there are many ranks, a row is a node or several nodes. The same events of all ranks of a
row in one step are one mark.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Sequence

from ..human_readable.wording import named
from .launches import Launch, nodes_of
from .read_logs import Event

MOST_ROWS = 64
LANES = {"save": "stall", "protect": "protect", "drain": "drain"}
"""Kinds of events that are drawn as bars → names on the page."""


@dataclasses.dataclass
class Mark:
    """Events of one kind that are drawn as one bar.

    Attributes:
        began, ended: Unix seconds.
        first, last: steps.
        count: number of steps.
        seconds: sum of the times of these steps, each on the slowest rank of the row.
        nbytes: sum of their bytes.
    """

    began: float
    ended: float
    first: int
    last: int
    count: int = 1
    seconds: float = 0.0
    nbytes: int = 0

    @property
    def share(self) -> float:
        """Share of its length that its events fill."""
        return min(1.0, self.seconds / (self.ended - self.began)) if self.ended > self.began else 1.0


@dataclasses.dataclass
class Life:
    """A launch in a row: its number, its first and last event, and how many ranks went silent or failed."""

    launch: int
    began: float
    ended: float
    silent: int = 0
    failed: int = 0


@dataclasses.dataclass
class Row:
    """A row of the timeline.

    Attributes:
        name: "rank 3", "n1", "n1 +3" (and three more).
        node: node of its ranks; the first one if there are several.
        ranks: number of ranks.
        what: description of the row.
        lives: its launches.
        marks: kind of event → its marks, by their begin.
    """

    name: str
    node: str
    ranks: int
    what: str
    lives: list[Life] = dataclasses.field(default_factory=list)
    marks: dict[str, list[Mark]] = dataclasses.field(default_factory=dict)


def rows(launches: Sequence[Launch], most: int = MOST_ROWS) -> list[Row]:
    """Make the rows: one for each rank on each of its nodes, or fewer if there would be more than ``most``."""
    row_of, found = _places(launches, most)
    for number, launch in enumerate(launches):
        lives: dict[int, Life] = {}
        together: dict[tuple[int, str, int, int], Mark] = {}
        again: Counter[tuple[int, str, int]] = Counter()  # how often a rank did the same: a step may come twice
        for event in launch.events:
            at = row_of[event.node, event.rank]
            life = lives.setdefault(at, Life(number, event.began, event.time))
            life.began, life.ended = min(life.began, event.began), max(life.ended, event.time * event.is_sign)
            if event.kind in LANES or event.kind in ("commit", "restore"):
                again[event.rank, event.kind, event.step] += 1
                turn = again[event.rank, event.kind, event.step]
                _join(together, (at, event.kind, event.step, turn), event)
        for rank in launch.signs:
            life = lives[row_of[launch.places[rank], rank]]
            life.silent += rank not in launch.ends
            life.failed += launch.ends.get(rank) == "failed"
        for at, life in lives.items():
            found[at].lives.append(life)
        for (at, kind, *_), mark in together.items():
            found[at].marks.setdefault(kind, []).append(mark)
    for row in found:
        for marks in row.marks.values():
            marks.sort(key=lambda mark: mark.began)
    return found


def _join(together: dict[tuple[int, str, int, int], Mark], key: tuple[int, str, int, int], event: Event) -> None:
    mark = together.setdefault(key, Mark(event.began, event.time, event.step, event.step))
    mark.began, mark.ended = min(mark.began, event.began), max(mark.ended, event.time)
    mark.seconds, mark.nbytes = max(mark.seconds, event.seconds), mark.nbytes + event.nbytes


def _places(launches: Sequence[Launch], most: int) -> tuple[dict[tuple[str, int], int], list[Row]]:
    """Return the row of each rank on each node, and the empty rows."""
    order = nodes_of(launches)
    seen = {(event.node, event.rank) for launch in launches for event in launch.events}
    places = sorted(seen, key=lambda place: (order[place[0]], place[1]))
    if len(places) <= most:
        found = [Row(f"rank {rank}", node, 1, f"rank {rank} on {node}") for node, rank in places]
        return {place: at for at, place in enumerate(places)}, found
    ranks_of: dict[str, list[int]] = {}
    for node, rank in places:
        ranks_of.setdefault(node, []).append(rank)
    found = []
    row_of: dict[tuple[str, int], int] = {}
    for group in _groups(list(ranks_of), launches, most):
        ranks = sorted({rank for node in group for rank in ranks_of[node]})
        row_of |= {(node, rank): len(found) for node in group for rank in ranks_of[node]}
        name = group[0] if len(group) == 1 else f"{group[0]} +{len(group) - 1}"
        what = f"{name}, {named(ranks)}" if len(group) == 1 else f"{group[0]} to {group[-1]}, {named(ranks)}"
        found.append(Row(name, group[0], len(ranks), what))
    return row_of, found


def _groups(nodes: Sequence[str], launches: Sequence[Launch], most: int) -> list[list[str]]:
    """Group neighboring nodes, except nodes that were lost or added, because these matter most."""
    alone = [node for node in nodes if any(node not in launch.nodes for launch in launches)][: most // 4]
    each = 1 if len(nodes) <= most else math.ceil(len(nodes) / (most - 2 * len(alone)))
    groups: list[list[str]] = []
    for node in nodes:
        if not groups or node in alone or groups[-1][-1] in alone or len(groups[-1]) == each:
            groups.append([])
        groups[-1].append(node)
    return groups


def within(marks: Iterable[Mark], began: float, ended: float, most: int | None) -> list[Mark]:
    """Return the marks between two moments. If there are more than ``most``, join those that begin in the same cell.

    All cells have the same length and no gaps between them. Empty cells are left out.
    """
    inside = [mark for mark in marks if mark.ended >= began and mark.began <= ended]
    if most is None or len(inside) <= most:
        return inside
    length_s = (ended - began) / most
    cells: dict[int, Mark] = {}
    for mark in inside:
        number = int((mark.began - began) // length_s)
        cell = cells.get(number)
        if cell is None:
            cells[number] = dataclasses.replace(mark)
            continue
        cell.ended, cell.last = max(cell.ended, mark.ended), mark.last
        cell.count, cell.seconds, cell.nbytes = cell.count + 1, cell.seconds + mark.seconds, cell.nbytes + mark.nbytes
    for number, cell in cells.items():
        if number - 1 in cells:
            cell.began = min(cell.began, began + number * length_s)
        if number + 1 in cells:
            cell.ended = max(cell.ended, began + (number + 1) * length_s)
    return list(cells.values())
