"""The timeline: a row for each rank that shows its events from left to right. It is SVG and needs no script.

Horizontal lengths are shares of the width, so that it fits any screen. Heights are pixels.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

from ..human_readable.wording import many
from .formatting import clock, lasted, show_bytes, show_seconds, show_time, ticks
from .job_history import JobHistory
from .markup import Markup, percent, tag, titled
from .recoveries import Recovery, say
from .timeline_rows import LANES, Life, Mark, Row, within

_MOST_MARKS = 7000  # in one drawing; about a megabyte
_AXIS, _GAP, _FOOT = 42, 9, 6  # pixels: above the rows, between nodes, below
_THIN = 0.002  # smallest width of a mark, as a share of the width
_DENSE = (0.02, 0.1, 0.3)  # shares of the time; a mark of several steps is paler if they fill less of it


@dataclasses.dataclass(frozen=True)
class Window:
    """A part of the time that fills the width of the drawing, in Unix seconds."""

    began: float
    ended: float

    @property
    def span(self) -> float:
        """Its length in seconds; never 0."""
        return max(self.ended - self.began, 1e-3)

    def shows(self, began: float, ended: float) -> bool:
        """Say whether it shows any part of a time."""
        return began <= self.ended and ended >= self.began

    def at(self, time: float) -> float:
        """Return the place of a moment, as a share of the width."""
        return min(1.0, max(0.0, (time - self.began) / self.span))


@dataclasses.dataclass(frozen=True)
class Heights:
    """Pixels of a row: its height, and (top, height) of its parts."""

    row: int
    alive: tuple[float, float]
    save: tuple[float, float]
    protect: tuple[float, float]
    drain: tuple[float, float]


def _heights(rows: int) -> Heights:
    if rows <= 20:
        return Heights(26, (2, 22), (4, 7), (11.5, 5), (18, 4))
    if rows <= 40:
        return Heights(18, (1, 16), (2.5, 5), (8, 3.5), (12.5, 3))
    return Heights(13, (1, 11), (2, 4), (6.5, 2.5), (9.5, 2))


def draw(story: JobHistory, rows: Sequence[Row], window: Window, name: str, title: str) -> Markup:
    """Draw a part of the time.

    Args:
        story, rows: history and rows of the job.
        window: the part of the time.
        name: name of the drawing, unique on the page.
        title: what it shows.
    """
    rows = [row for row in rows if any(window.shows(life.began, life.ended) for life in row.lives)]
    heights = _heights(len(rows))
    tops, bottom = _tops(rows, heights)
    step_s, times = ticks(window.began, window.ended)
    most = _most_marks(rows)
    drawn = [
        _hatches(name),
        *(_grid(window.at(time), bottom) for time in times),
        *(_row(row, top, heights, window, most) for row, top in zip(rows, tops, strict=True)),
        *_across(story, window, bottom, name),
        *(_axis_label(window.at(time), clock(time, step_s)) for time in times),
    ]
    picture = tag(
        "svg", titled(title), *drawn, class_="plot", width="100%", height=bottom + _FOOT, role="img", aria_label=title,
        data_rows=len(rows),
    )  # fmt: skip
    labels = tag("div", *_labels(rows, tops, heights), class_="labels", style=f"height:{bottom + _FOOT}px")
    return tag("div", labels, picture, class_="timeline", tabindex="0", role="group", aria_label=title)


def _tops(rows: Sequence[Row], heights: Heights) -> tuple[list[int], int]:
    """Return where the rows begin, with a gap between nodes, and where the last one ends."""
    tops, at, node = [], _AXIS, rows[0].node if rows else ""  # there may be no rank in that time
    for row in rows:
        at += _GAP if row.node != node and row.ranks == 1 else 0
        node = row.node
        tops.append(at)
        at += heights.row
    return tops, at


def _labels(rows: Sequence[Row], tops: Sequence[int], heights: Heights) -> Iterator[Markup]:
    node = None
    for row, top in zip(rows, tops, strict=True):
        of_node = row.ranks == 1 and row.node != node
        node = row.node
        text = [tag("b", row.node)] if of_node else []
        yield tag("div", *text, tag("span", row.name), class_="label", title=row.what,
                  style=f"top:{top}px;height:{heights.row}px;line-height:{heights.row}px")  # fmt: skip


def _hatches(name: str) -> Markup:
    """Make patterns for lost training and for the time when nothing ran."""

    def hatch(what: str) -> Markup:
        line = tag("line", x1="0", y1="0", x2="0", y2="6", class_=f"{what}-line")
        ground = tag("rect", width="6", height="6", class_=f"{what}-ground")
        return tag("pattern", ground, line, id=f"{name}-{what}", width="6", height="6", patternUnits="userSpaceOnUse",
                   patternTransform="rotate(45)")  # fmt: skip

    return tag("defs", hatch("lost"), hatch("down"))


def _grid(share: float, bottom: int) -> Markup:
    return tag("line", x1=percent(share), x2=percent(share), y1=20, y2=bottom, class_="grid")


def _axis_label(share: float, text: str) -> Markup:
    # A centered label would be cut off at the edges.
    anchor = "start" if share < 0.03 else "end" if share > 0.97 else "middle"
    return tag("text", text, x=percent(share), y=12, class_="tick", text_anchor=anchor)


def _most_marks(rows: Sequence[Row]) -> int | None:
    """Return how many marks of a kind a row may have. None: all of them."""
    counts = [len(marks) for row in rows for marks in row.marks.values()]
    return None if sum(counts) <= _MOST_MARKS else max(40, min(600, _MOST_MARKS // len(counts)))


def _row(row: Row, top: int, heights: Heights, window: Window, most: int | None) -> Markup:
    parts = [titled(_summary(row))]
    for life in row.lives:
        parts += _alive(life, top, heights, window)
    for mark in within(row.marks.get("restore", ()), window.began, window.ended, most):
        parts.append(_bar(mark, "restore", top, heights.alive, window, _restored(mark)))
    for kind, lane in LANES.items():
        for mark in within(row.marks.get(kind, ()), window.began, window.ended, most):
            parts.append(_bar(mark, lane, top, getattr(heights, kind), window, _SAY[kind](mark)))
    above, height = heights.protect
    commits = within(_moments(row.marks.get("commit", ())), window.began, window.ended, most)
    if all(mark.count == 1 for mark in commits):  # more would cover everything, and the lane of protection is enough
        parts += [_bar(mark, "commit", top, (above - 1.5, height + 3), window, _committed(mark)) for mark in commits]
    return tag("g", *parts, class_="row", data_row=row.what)


def _moments(marks: Iterable[Mark]) -> Iterator[Mark]:
    """Turn commits into moments: the time when the last rank knew of the commit."""
    return (dataclasses.replace(mark, began=mark.ended) for mark in marks)


def _alive(life: Life, top: int, heights: Heights, window: Window) -> list[Markup]:
    if not window.shows(life.began, life.ended):
        return []
    left, right = window.at(life.began), window.at(life.ended)
    above, height = heights.alive
    return [tag("rect", x=percent(left), width=percent(max(right - left, _THIN)), y=top + above, height=height, rx=3,
                class_="alive")]  # fmt: skip


def _bar(mark: Mark, kind: str, top: int, at: tuple[float, float], window: Window, text: str) -> Markup:
    left, right = window.at(mark.began), window.at(mark.ended)
    width = max(right - left, _THIN)
    pale = sum(mark.share > limit for limit in _DENSE) if mark.count > 1 else len(_DENSE)
    dense = "" if pale == len(_DENSE) else f" d{pale}"
    return tag("rect", titled(text), x=percent(min(left, 1 - width)), width=percent(width), y=top + at[0], height=at[1],
               class_=kind + dense)  # fmt: skip


def _across(story: JobHistory, window: Window, bottom: int, name: str) -> Iterator[Markup]:
    """Draw what concerns all rows: lost training, time without any process, recoveries in place, failures."""

    def band(began: float, ended: float, what: str, text: str) -> Markup | None:
        if ended <= window.began or began >= window.ended:
            return None
        left, right = window.at(began), window.at(ended)
        return tag("rect", titled(text), x=percent(left), width=percent(max(right - left, _THIN)), y=_AXIS - 4,
                   height=bottom - _AXIS + 4, fill=f"url(#{name}-{what})", class_=what)  # fmt: skip

    bands = [
        band(lost.began, lost.ended, "lost", f"{lasted(lost.ended - lost.began)} of lost training")
        for lost in story.lost
    ]
    for before, after in itertools.pairwise(story.launches):
        bands.append(band(before.last, after.began, "down", f"down for {lasted(after.began - before.last)}"))
    yield from (one for one in bands if one is not None)
    for number, recovery in enumerate(story.recoveries, 1):
        if window.shows(recovery.began, recovery.ended):
            yield _recovered(f"R{number}", recovery, window, bottom)
    for number, failure in enumerate(story.failures, 1):
        if window.began <= failure.time <= window.ended:
            at = percent(window.at(failure.time))
            text = f"failure {number}: the last event of launch {failure.launch + 1}, {show_time(failure.time)} UTC"
            line = tag("line", x1=at, x2=at, y1=_AXIS - 5, y2=bottom, class_="failure")
            badge = tag("text", str(number), x=at, y=_AXIS - 9, class_="badge", text_anchor="middle")
            yield tag("g", titled(text), line, badge, class_="failed")


def _recovered(name: str, recovery: Recovery, window: Window, bottom: int) -> Markup:
    left, right = window.at(recovery.began), window.at(recovery.ended)
    width = max(right - left, _THIN)
    at = percent(min(left, 1 - width))
    band = tag("rect", x=at, width=percent(width), y=_AXIS - 5, height=bottom - _AXIS + 5)
    badge = tag("text", name, x=at, y=_AXIS - 9, class_="badge", text_anchor="middle")
    return tag("g", titled(f"{name}: {say(recovery)}"), band, badge, class_="recovered")


def _steps(mark: Mark) -> str:
    return f"step {mark.first:,}" if mark.count == 1 else f"{mark.count:,} steps, {mark.first:,} to {mark.last:,}"


def _speed(mark: Mark) -> str:
    return f" ({show_bytes(mark.nbytes / mark.seconds)}/s)" if mark.seconds > 0 and mark.nbytes else ""


def _stalled(mark: Mark) -> str:
    return f"{_steps(mark)}: training stalled for {show_seconds(mark.seconds)}"


def _protected(mark: Mark) -> str:
    return f"{_steps(mark)}: {show_bytes(mark.nbytes)} protected in {show_seconds(mark.seconds)}{_speed(mark)}"


def _drained(mark: Mark) -> str:
    return f"{_steps(mark)}: {show_bytes(mark.nbytes)} drained in {show_seconds(mark.seconds)}{_speed(mark)}"


def _restored(mark: Mark) -> str:
    return f"{_steps(mark)}: restored in {show_seconds(mark.seconds)}{_speed(mark)}"


def _committed(mark: Mark) -> str:
    return f"{_steps(mark)}: committed {show_seconds(mark.seconds)} after its save, at {clock(mark.ended)} UTC"


_SAY = {"save": _stalled, "protect": _protected, "drain": _drained}


def _summary(row: Row) -> str:
    """Describe a row for screen readers."""
    counts = [(kind, len(row.marks.get(kind, ()))) for kind in ("save", "commit", "restore")]
    told = [many(count, kind) for kind, count in counts if count]
    text = f"{row.what}: {', '.join([many(len(row.lives), 'launch'), *told])}"
    silent = [str(life.launch + 1) for life in row.lives if life.silent]
    return text + (f"; no end logged in launch {', '.join(silent)}" if silent else "")


def legend(entries: Sequence[tuple[str, str, str]]) -> Markup:
    """Explain colors: (class, name, meaning)."""
    items = [tag("li", tag("i", class_=f"key {kind}"), tag("span", name), title=text) for kind, name, text in entries]
    return tag("ul", *items, class_="legend")
