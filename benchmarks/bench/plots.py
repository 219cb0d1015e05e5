"""Rows → a plot: bars of median ratios, whiskers from quartile to quartile, aims as lines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .rows import Row, aims_of

# Seen on white and on black: no background, and colours of middling brightness.
INK, BAR, AIM = "#808890", "#4a90c4", "#e0662f"
LOG_FROM = 20.0  # a ratio of ratios from which on a linear scale hides the small ones
MOST = 40  # bars


def draw(path: Path, rows: Sequence[Row], yardstick: str) -> None:
    """Draw the rows that have this yardstick, the first at the top; none where there are none."""
    import matplotlib
    from matplotlib.figure import Figure

    bars = [one for one in rows if yardstick in one.get("over", ())][:MOST]
    if not bars:
        return
    style = {"svg.fonttype": "none", "svg.hashsalt": "mlflash", "text.color": INK, "axes.edgecolor": INK,
             "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "font.size": 9}  # fmt: skip
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(8, 0.9 + 0.24 * len(bars)), layout="constrained")
        axes = figure.subplots()
        values = [one["over"][yardstick] for one in bars]
        low, high = zip(*(one.get("spread", {}).get(yardstick, (v, v)) for one, v in zip(bars, values, strict=True)),
                        strict=True)  # fmt: skip
        at = range(len(bars))
        axes.barh(at, values, color=BAR, height=0.6)
        axes.hlines(at, low, high, color=INK, linewidth=1.5)
        for height, one in enumerate(bars):
            for most in (most for of, most in aims_of(one) if of == yardstick):
                axes.vlines(most, height - 0.42, height + 0.42, color=AIM, linewidth=2)
        axes.set_yticks(at, [label(one) for one in bars])
        axes.invert_yaxis()
        if max(values) > LOG_FROM * max(min(values), 1e-9):
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.axvline(1, color=INK, linewidth=0.8, linestyle=":")
        axes.set_xlabel(f"times {yardstick}; orange: at most (the aim)")
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, transparent=True, metadata={"Date": None, "Creator": None})


def label(one: Row) -> str:
    return ": ".join(filter(None, (one.get("case"), one["what"], one.get("column"))))
