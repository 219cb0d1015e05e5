"""Draws rows as a plot: bars of median ratios, whiskers from quartile to quartile, aims as lines."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from .rows import Row, aims_of

# Readable on white and on black: no background, and colors of medium brightness.
INK, BAR, AIM = "#808890", "#4a90c4", "#e0662f"
LOG_FROM, LOG_LEAST = 12.0, 0.1  # the scale is logarithmic if a ratio is larger, and starts here
WIDTH = 60  # letters of a label
MOST = 40  # bars


def draw(path: Path, rows: Sequence[Row], yardstick: str) -> None:
    """Draw the rows that have this yardstick, grouped by case, the first at the top. Without rows, draw nothing."""
    import matplotlib
    from matplotlib.figure import Figure

    bars = [one for one in rows if yardstick in one.get("over", ())][:MOST]
    if not bars:
        return
    lines = list(_lines(bars))
    at = {id(one): height for height, one in enumerate(lines) if not isinstance(one, str)}
    values = [one["over"][yardstick] for one in bars]
    style = {"svg.fonttype": "none", "svg.hashsalt": "mlflash", "text.color": INK, "axes.edgecolor": INK,
             "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "font.size": 9}  # fmt: skip
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(8, 0.9 + 0.22 * len(lines)), layout="constrained")
        axes = figure.subplots()
        axes.barh(list(at.values()), values, color=BAR, height=0.6)
        for one, value in zip(bars, values, strict=True):
            height = at[id(one)]
            axes.hlines(height, *one.get("spread", {}).get(yardstick, (value, value)), color=INK, linewidth=1.5)
            for most in (most for of, most in aims_of(one) if of == yardstick):
                axes.vlines(most, height - 0.42, height + 0.42, color=AIM, linewidth=2)
        axes.set_yticks(list(at.values()), [_label(one) for one in bars])
        axes.set_ylim(len(lines) - 0.4, -0.6)
        if max(values) > LOG_FROM:
            axes.set_xscale("log")
            axes.set_xlim(left=LOG_LEAST)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        for height, line in enumerate(lines):
            if isinstance(line, str):
                axes.annotate(line, (0, height), xycoords=("axes fraction", "data"), va="center", style="italic")
        axes.axvline(1, color=INK, linewidth=0.8, linestyle=":")
        axes.set_xlabel(f"times {yardstick}; orange: the aim")
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(
            path, transparent=True, metadata={"Date": None, "Creator": None} if path.suffix == ".svg" else {}
        )


def _lines(bars: Sequence[Row]) -> Iterator[Row | str]:
    """Yield the bars, with a heading before the bars of each case."""
    case = ""
    for one in bars:
        if one.get("case", "") != case:
            case = one.get("case", "")
            yield case
        yield one


def _label(one: Row) -> str:
    return textwrap.fill(": ".join(filter(None, (one["what"], one.get("column")))), WIDTH)
