"""Curves over time as SVG that fills any width: a line for the median rank, a band for all ranks."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator, Sequence

from .advice import Advice
from .formatting import clock, show_seconds, ticks
from .log_statistics import Point
from .markup import Markup, percent, tag, titled
from .timeline import Window

_MOST_POINTS = 240
_WIDTH, _HEIGHT = 1000.0, 160.0  # size of the drawing; its width is stretched
_ROUND = ((1, 4), (1.5, 3), (2, 4), (3, 3), (4, 4), (5, 5), (6, 3), (8, 4), (10, 5))  # the end of a scale, its parts
_SPREAD = 12.0  # above this ratio of largest value to median, a scale is logarithmic


@dataclasses.dataclass(frozen=True)
class Scale:
    """Values → heights, from 0 at the bottom to 1 at the top."""

    least: float
    most: float
    logarithmic: bool = False
    parts: int = 4

    def at(self, value: float) -> float:
        """Return the height of a value."""
        if self.logarithmic:
            return _within(math.log(max(value, self.least) / self.least) / math.log(self.most / self.least))
        return _within((value - self.least) / (self.most - self.least))

    def marks(self) -> list[float]:
        """Return the values to write next to the scale."""
        if not self.logarithmic:
            return [self.least + (self.most - self.least) * part / self.parts for part in range(self.parts + 1)]
        first, last = round(math.log10(self.least)), round(math.log10(self.most))
        return [10.0**power for power in range(first, last + 1, max(1, (last - first) // 4))]


def _within(share: float) -> float:
    return min(1.0, max(0.0, share))


def scale(points: Sequence[Point], unit: float = 1.0) -> Scale:
    """Choose a scale: from 0, or logarithmic if a few values are far above the others.

    Args:
        points: the values that it must show.
        unit: the numbers next to it are round multiples of this unit, such as 1 GiB.
    """
    most = max(point.most for point in points)
    median = statistics.median(point.median for point in points)
    least = min((point.least for point in points if point.least > 0), default=0.0)
    if least > 0 and most > _SPREAD * median:
        return Scale(10.0 ** math.floor(math.log10(least)), 10.0 ** math.ceil(math.log10(most) + 1e-9), True)
    return _linear(most, unit)


def _linear(most: float, unit: float) -> Scale:
    """Make a scale from 0 to a round number of units, in round parts."""
    value = most / unit
    power = 10.0 ** math.floor(math.log10(value)) if value > 0 else 1.0
    factor, parts = next((one for one in _ROUND if one[0] * power >= value * 0.9999), _ROUND[-1])
    return Scale(0.0, factor * power * unit, parts=parts)


def thinned(points: Sequence[Point], most: int = _MOST_POINTS) -> list[list[Point]]:
    """Join neighboring points until there are at most ``most`` groups. Points of different launches stay apart."""
    if len(points) <= most:
        return [[point] for point in points]
    span = max(points[-1].time - points[0].time, 1e-9)
    found: list[list[Point]] = []
    key: tuple[int, int] | None = None
    for point in points:
        now = (point.launch, int((point.time - points[0].time) / span * most))
        if now != key:
            found.append([])
        found[-1].append(point)
        key = now
    return found


def curve(points: Sequence[Point], window: Window, failures: Sequence[float], name: str, title: str, unit: float,
          show: Callable[[float], str]) -> Markup:  # fmt: skip
    """Draw values over time.

    Args:
        points: at least one point, ordered by time.
        window: the time from left to right.
        failures: Unix seconds at which to draw a line.
        name: class of the drawing, which gives its color.
        title: what it shows.
        unit: see `scale`.
        show: writes a value.
    """
    points = sorted(points, key=lambda point: point.time)
    chosen = scale(points, unit)
    groups = thinned(points)
    lines = [tag("line", x1=percent(window.at(t)), x2=percent(window.at(t)), y1=0, y2=_HEIGHT, class_="failure")
             for t in failures]  # fmt: skip
    hover = [_hover(before, group, after, window, show) for before, group, after in _neighbours(groups)]
    step_s, times = ticks(window.began, window.ended, 5)
    labels = [(window.at(time), clock(time, step_s)) for time in times]
    return _chart(name, title, chosen, [*lines, _stretched(*_paths(groups, window, chosen)), *hover], labels, show)


def _stretched(*paths: Markup) -> Markup:
    """Draw paths on an area of `_WIDTH` x `_HEIGHT` that fills the available width."""
    return tag("svg", *paths, viewBox=f"0 0 {_WIDTH:g} {_HEIGHT:g}", preserveAspectRatio="none", width="100%",
               height=_HEIGHT)  # fmt: skip


def _chart(name: str, title: str, chosen: Scale, content: Sequence[Markup], labels: Sequence[tuple[float, str]],
           show: Callable[[float], str]) -> Markup:  # fmt: skip
    """Put a drawing on a grid, with values next to it and texts below.

    Args:
        name, title: see `curve`.
        chosen: the scale from bottom to top.
        content: the elements to draw on the grid, in order.
        labels: texts below the grid, each with its share of the width.
        show: writes a value.
    """
    levels = [(1 - chosen.at(value)) * _HEIGHT for value in chosen.marks()]
    grid = [tag("line", x1="0", x2="100%", y1=y, y2=y, class_="grid") for y in levels]
    texts = [
        tag("text", text, x=percent(x), y=_HEIGHT + 18, class_="tick",
            text_anchor="start" if x < 0.06 else "end" if x > 0.94 else "middle") for x, text in labels
    ]  # fmt: skip
    picture = tag("svg", titled(title), *grid, *content, *texts, width="100%", height=_HEIGHT + 24, role="img",
                  aria_label=title, class_="curve")  # fmt: skip
    beside = [tag("span", show(value), style=f"top:{level:.0f}px")
              for value, level in zip(chosen.marks(), levels, strict=True)]  # fmt: skip
    return tag("div", tag("div", *beside, class_="levels"), picture, class_=f"chart {name}")


def _paths(groups: Sequence[Sequence[Point]], window: Window, chosen: Scale) -> Iterator[Markup]:
    """Yield a band and a line for each launch."""
    of: dict[int, list[tuple[float, float, float, float]]] = {}
    for group in groups:
        x = window.at(group[0].time + (group[-1].time - group[0].time) / 2) * _WIDTH
        least, most = min(point.least for point in group), max(point.most for point in group)
        middle = statistics.median(point.median for point in group)
        heights = [_HEIGHT * (1 - chosen.at(value)) for value in (least, middle, most)]
        of.setdefault(group[0].launch, []).append((x, *heights))  # type: ignore[arg-type]
    for its in of.values():
        upper, lower = [(x, top) for x, _, _, top in its], [(x, bottom) for x, bottom, _, _ in reversed(its)]
        yield tag("path", d=f"{_line([*upper, *lower])}Z", class_="band")
    for its in of.values():
        yield tag("path", d=_line([(x, y) for x, _, y, _ in its] or [(0, 0)]), class_="line")


def _line(points: Sequence[tuple[float, float]]) -> str:
    text = "".join(f"{'L' if number else 'M'}{x:.1f} {y:.1f}" for number, (x, y) in enumerate(points))
    return f"{text}h0.1" if len(points) == 1 else text


def _neighbours(groups: Sequence[Sequence[Point]]) -> Iterator[tuple[float, Sequence[Point], float]]:
    """Yield each group with the midpoints between it and its neighbors."""
    for number, group in enumerate(groups):
        before = groups[number - 1][-1].time if number else group[0].time
        after = groups[number + 1][0].time if number + 1 < len(groups) else group[-1].time
        yield (before + group[0].time) / 2, group, (after + group[-1].time) / 2


def _hover(began: float, group: Sequence[Point], ended: float, window: Window, show: Callable[[float], str]) -> Markup:
    least, most = min(point.least for point in group), max(point.most for point in group)
    middle = statistics.median(point.median for point in group)
    steps = f"step {group[0].step:,}" if len(group) == 1 else f"steps {group[0].step:,} to {group[-1].step:,}"
    text = f"{clock(group[0].time)} UTC, {steps}: median rank {show(middle)}"
    text += f", all ranks {show(least)} to {show(most)}" if least < most else ""
    left, right = window.at(began), window.at(ended)
    return tag("rect", titled(text), x=percent(left), width=percent(max(right - left, 0.002)), y=0, height=_HEIGHT,
               class_="hover")  # fmt: skip


def waste_curve(advice: Advice, wastes: Callable[[float], float]) -> Markup:
    """Draw the share of time that saves and failures cost over the interval. Mark the best and the present interval."""
    assert advice.best_s
    marked = [("best", advice.best_s)] + ([("now", advice.now_s)] if advice.now_s else [])
    first = math.log(min(value for _, value in marked) / 10)
    last = math.log(max(value for _, value in marked) * 10)
    intervals = [math.exp(first + (last - first) * part / 80) for part in range(81)]
    values = [min(1.0, wastes(interval)) for interval in intervals]
    chosen = _linear(min(1.0, 2.5 * max(wastes(value) for _, value in marked)), 0.01)

    def x_of(interval: float) -> float:
        return (math.log(interval) - first) / (last - first)

    points = [(x_of(interval) * _WIDTH, _HEIGHT * (1 - value / chosen.most))
              for interval, value in zip(intervals, values, strict=True)]  # fmt: skip
    inside = [(x, max(y, -_HEIGHT)) for x, y in points]
    marks = []
    for name, interval in marked:
        at = percent(x_of(interval))
        text = f"{name}: {show_seconds(interval)}, {100 * wastes(interval):.2g} % of the time"
        marks.append(tag("g", titled(text), tag("line", x1=at, x2=at, y1=0, y2=_HEIGHT), class_=f"interval {name}"))
    nice = _nice_intervals(intervals[0], intervals[-1])
    labels = [(x_of(value), show_seconds(value)) for value in nice if 0.05 < x_of(value) < 0.95]
    title = "Share of the time that saves and failures cost, over the time from save to save"
    line = _stretched(tag("path", d=_line(inside), class_="line"))
    return _chart("waste", title, chosen, [line, *marks], labels, lambda value: f"{100 * value:.3g} %")


def _nice_intervals(least: float, most: float) -> list[float]:
    hour_s, day_s = 3600.0, 86400.0
    nice = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 60, 180, 600, 1800, hour_s, 3 * hour_s, 12 * hour_s,
            2 * day_s, 7 * day_s, 30 * day_s, 90 * day_s]  # fmt: skip
    return [value for value in nice if least <= value <= most]
