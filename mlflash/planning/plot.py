"""A plan as a picture: the share of wasted time against the interval between saves."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import ConfigError
from ..human_readable.units import show_seconds, show_share
from .interval import Costs, waste, young
from .scheme_comparison import Job, SchemeCosts

_SAME = 0.01  # curves that differ by less than this share of the axis are drawn as one
_APART = 0.05  # height of a line of text, as a share of the axis
_TICKS_S = (0.1, 1, 10, 60, 600, 3600, 6 * 3600, 86_400, 10 * 86_400, 100 * 86_400)
_LINES = ("-", "--", "-.", ":")


def draw(path: str, job: Job, costs: Costs, prospects: Sequence[SchemeCosts]) -> None:
    """Draw wasted time against the interval to a file. The end of its name chooses the format.

    Raises:
        ConfigError: matplotlib is not installed, or cannot write this format.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import NullLocator
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'mlflash[plot]'") from None
    intervals_s, top = _axes(costs, prospects)
    figure = Figure(figsize=(7.5, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.set_xscale("log")
    axes.set_xlim(intervals_s[0], intervals_s[-1])
    axes.set_ylim(0, top)
    _draw_commit(axes, costs, top)
    _draw_curves(axes, _curves(intervals_s, top, costs, prospects), intervals_s, top)
    ticks = [tick for tick in _TICKS_S if intervals_s[0] <= tick <= intervals_s[-1]]
    axes.set_xticks(ticks, [show_seconds(tick) for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} %")
    axes.set_xlabel("time from one save to the next")
    axes.set_ylabel("time not spent on new steps")
    axes.set_title(
        f"{len(job.node_names):,} nodes, a failure every {show_seconds(costs.mtbf_s)}; a save stalls "
        f"{show_seconds(costs.stall_s)}, a restart takes {show_seconds(costs.restart_s)}",
        fontsize=10, loc="left",
    )  # fmt: skip
    axes.grid(axis="y", color="0.92")
    axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot draw to {path!r}: {error}") from None


def _axes(costs: Costs, prospects: Sequence[SchemeCosts]) -> tuple[np.ndarray, float]:
    """Return intervals around the best one and the commit, on a logarithmic scale, and the highest percentage drawn.

    Raises:
        ConfigError: there is nothing to draw.
    """
    wasted = [100 * p.waste for p in prospects if p.waste is not None]
    if not wasted:
        raise ConfigError(
            "there is nothing to draw: memory covers no failure under any of these schemes",
            expected="another scheme than none, or --drain-every and --pfs-restart",
        )
    best_s = max(young(costs.stall_s, costs.mtbf_s), costs.commit_s)
    low_s = max(1.05 * costs.stall_s, min(best_s / 40, costs.commit_s / 2))
    return np.geomspace(low_s, 40 * best_s, 400), min(100.0, max(3 * min(wasted), 1.4 * max(wasted)))


def _curves(intervals_s: np.ndarray, top: float, costs: Costs, prospects: Sequence[SchemeCosts]
            ) -> list[tuple[str, np.ndarray, float | None]]:  # fmt: skip
    """Return label, percentages and best interval of each distinct curve, the lowest first."""
    found: list[tuple[list[str], np.ndarray, float | None]] = []
    for p in prospects:
        if p.waste is None or p.uncovered is None:
            continue
        # If memory covers nothing, saves only cost time: the line then shows a job that does not save to memory.
        shares = [waste(None if p.interval_s is None else float(t), costs, p.uncovered) for t in intervals_s]
        values = np.minimum(100 * np.array(shares), 1.05 * top)
        for names, known, _ in found:
            if np.abs(values - known).max() < _SAME * top:
                names.append(str(p.scheme))
                break
        else:
            found.append(([str(p.scheme)], values, p.interval_s))
    found.sort(key=lambda curve: float(curve[1].min()))
    return [(", ".join(names), values, best_s) for names, values, best_s in found]


def _draw_curves(axes: Any, curves: Sequence[tuple[str, np.ndarray, float | None]], intervals_s: np.ndarray,
                 top: float) -> None:  # fmt: skip
    middle_s = next((best_s for _, _, best_s in curves if best_s is not None), float(intervals_s[200]))
    free = 0.0  # share of the axis above which there is no label yet
    for number, (label, values, best_s) in enumerate(curves):
        shade = str(round(0.6 * number / max(2, len(curves) - 1), 2))
        axes.plot(intervals_s, values, _LINES[number % len(_LINES)], color=shade, linewidth=1.8)
        height = float(np.interp(best_s or middle_s, intervals_s, values)) / top
        text = f"{label}: {show_share(height * top / 100)}"
        if best_s is not None:
            axes.plot([best_s], [height * top], "o", color=shade, markersize=6)
            text += f", saved every {show_seconds(best_s)}"
        lines = textwrap.wrap(re.sub(r"(?<=\d) (?=\S+)", "\u00a0", text), 46)
        below = number == 0 and height > _APART * (len(lines) + 0.5)
        at = height - 0.03 if below else max(free, height + 0.05)
        free = height if below else at + _APART * len(lines)
        axes.text(
            middle_s, at * top, "\n".join(lines), ha="center", va="top" if below else "bottom", fontsize=9, color=shade,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.8},
        )  # fmt: skip


def _draw_commit(axes: Any, costs: Costs, top: float) -> None:
    low_s = axes.get_xlim()[0]
    axes.axvspan(low_s, costs.commit_s, color="0.93", zorder=0)
    if costs.commit_s > 1.4 * low_s:
        axes.text(
            costs.commit_s / 1.05, 0.97 * top, "shorter than a commit", ha="right", va="top", fontsize=8, color="0.4",
            rotation=90,
        )  # fmt: skip
