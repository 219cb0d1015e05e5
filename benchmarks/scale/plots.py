"""Draws the plots: seconds and bytes against ranks, and committed, restored and wasted time against GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scale import agreement, paths, planning, recoveries
from scale.forecast import Line, Point
from scale.growth import Series
from scale.parameters import Node

_SHADES = ("#1f6fb4", "#c2571a", "#2e8b57", "#8a5fbf", "0.45", "0.6")  # readable on white and on black
_GREY = "0.5"
_STYLE = {"svg.fonttype": "none", "axes.edgecolor": _GREY, "axes.labelcolor": _GREY, "xtick.color": _GREY,
          "ytick.color": _GREY, "text.color": _GREY, "axes.titlecolor": _GREY, "font.size": 9}  # fmt: skip


def draw_ranks(path: Path, plans: Sequence[planning.Row], jobs: Sequence[agreement.Row]) -> None:
    """Draw what one rank needs. The band of each quantity reaches from the scheme with least to the one with most."""
    with _figure(path, 2) as (left, right):
        aims = [
            (left, planning.PLANNING_S, "aim for planning"),
            (right, planning.INVENTORY_MB, "aim for the inventory"),
        ]
        for axes, most, text in aims:
            axes.plot([plans[0].ranks, planning.AIMED_RANKS], [most, most], color=_GREY, alpha=0.4, linewidth=5)
            axes.annotate(text, (planning.AIMED_RANKS, most), (8, -3), textcoords="offset points", fontsize=8)
        seconds = {"planning_s": "planning", "join_s": "inventory", "choose_s": "choice"}
        for shade, (name, label) in zip(_SHADES, seconds.items(), strict=False):
            _band(left, plans, name, label, shade)
        _band(left, jobs, "commit_s", "commit of 4 MiB", _SHADES[3])
        _band(left, [job for job in jobs if not job.alike], "restore_s", "restore of 4 MiB", _SHADES[4])
        _band(right, plans, "table_mb", "table of a rank", _SHADES[0])
        _band(right, plans, "received_mb", "inventory, to each node", _SHADES[1])
        for axes, title in ((left, "seconds of CPU time of a rank"), (right, "megabytes")):
            _scales(axes, sorted({row.ranks for row in plans}), "ranks, 8 on a node", title)


_GROWN = (
    (f"{paths.START}: B received by another rank", "start"),
    (f"{paths.RESTORE}: B received by another rank", "restore"),
    (f"{paths.RESHARD}: B received by another rank", "reshard, out of memory"),
    (f"{paths.RESHARD_OUT_OF_DIRECTORY}: B received by another rank", "reshard, from a directory"),
    (f"{paths.DRAIN}: B received by another rank", "drain"),
    (f"{paths.DRAIN}: B received by rank 0", "drain, to rank 0"),
)
_TOOK = (
    (f"{paths.COMMIT}: s of a rank", "commit"),
    (f"{paths.RESTORE}: s of a rank", "restore"),
    (f"{paths.RESHARD}: s of a rank", "reshard, out of memory"),
    (f"{paths.RESHARD_OUT_OF_DIRECTORY}: s of a rank", "reshard, from a directory"),
    (f"{paths.DRAIN}: s of a rank", "drain"),
    ("rank 0, hdf5: s, listing", "drain, what rank 0 lists for HDF5"),
)


def draw_growth(path: Path, grown: Sequence[Series]) -> None:
    """Draw bytes and seconds of each operation against ranks. A thin line has the slope of linear growth."""
    known = {one.what: one for one in grown}
    with _figure(path, 2) as (left, right):
        for axes, named, factor, title in ((left, _GROWN, 1e-6, "megabytes that a rank receives from collectives"),
                                           (right, _TOOK, 1.0, "seconds of CPU time of a rank")):  # fmt: skip
            there = [(known[what], label) for what, label in named if what in known]
            for shade, (one, label) in zip(_SHADES, there, strict=False):
                ranks, values = zip(*one.points, strict=True)
                axes.loglog(ranks, [factor * value for value in values], color=shade, linewidth=1.6, marker="o",
                            markersize=3, label=label)  # fmt: skip
            ranks = sorted({ranks for one, _ in there for ranks, _ in one.points})
            first = min(factor * one.points[0][1] for one, _ in there)
            axes.loglog(ranks, [first * n / ranks[0] for n in ranks], color=_GREY, alpha=0.5, linewidth=0.8)
            _scales(axes, ranks, "ranks, 8 on a node", title)


def draw_model(path: Path, points: Sequence[Point]) -> None:
    """Draw the seconds of a commit, of a restore, and from a failure to a state on all GPUs, against GPUs."""
    gpus = sorted({point.gpus for point in points})
    with _figure(path, 3) as (left, middle, right):
        for axes, name, title in ((left, "committed_s", "seconds to committed"), (middle, "restored_s", "to restored")):
            _lines(axes, points, name)
            _scales(axes, gpus, "GPUs", title)
        _recoveries(right, gpus)
        title = "from a failure to all restored; crosses: published by others"
        _scales(right, gpus, "GPUs", title, room=200)


def _recoveries(axes: Any, gpus: Sequence[int]) -> None:
    for shade, way in zip((*_SHADES, "0.75"), recoveries.WAYS, strict=True):
        axes.loglog(gpus, [way.of(number, Node()) for number in gpus], "-" if way.is_ours else "--", color=shade,
                    linewidth=1.6, marker="o", markersize=3, label=way.label)  # fmt: skip
    for letter, one in recoveries.lettered():
        if gpus[0] <= one.gpus <= gpus[-1]:
            axes.plot([one.gpus], [one.seconds], "x", color=_GREY, markersize=5)
            axes.annotate(f"{letter} {one.sign}", (one.gpus, one.seconds), (-4, 3), fontsize=8, ha="right",
                          textcoords="offset points")  # fmt: skip


def draw_waste(path: Path, points: Sequence[Point]) -> None:
    """Draw the share of time that a job loses against GPUs, for two rates of failures."""
    with _figure(path, 2) as (left, right):
        for axes, name, title in ((left, "waste", "% of time lost, a node fails every 264 days"),
                                  (right, "waste_rsc", "% of time lost, every 154 days")):  # fmt: skip
            _lines(axes, points, name, 100.0)
            _scales(axes, sorted({point.gpus for point in points}), "GPUs", title)


def _lines(axes: Any, points: Sequence[Point], name: str, factor: float = 1.0) -> None:
    lines: dict[Line, list[Point]] = {}
    for point in points:
        lines.setdefault(point.line, []).append(point)
    for shade, (line, those) in zip(_SHADES, lines.items(), strict=False):
        style = "-" if line.in_memory else "--"
        axes.loglog([p.gpus for p in those], [factor * getattr(p, name) for p in those], style, color=shade,
                    linewidth=1.6, marker="o", markersize=3, label=line.label)  # fmt: skip


def _band(axes: Any, rows: Sequence[Any], name: str, label: str, shade: str) -> None:
    ranks = sorted({row.ranks for row in rows})
    values = [[getattr(row, name) for row in rows if row.ranks == n] for n in ranks]
    axes.fill_between(ranks, [min(some) for some in values], [max(some) for some in values], color=shade, alpha=0.2,
                      linewidth=0)  # fmt: skip
    axes.loglog(ranks, [max(some) for some in values], color=shade, linewidth=1.6, marker="o", markersize=3,
                label=label)  # fmt: skip


def _scales(axes: Any, across: Sequence[int], label: str, title: str, room: float = 20) -> None:
    axes.set_xticks(across, [f"{n:,}" for n in across], rotation=30, ha="right")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()
    axes.set_xlabel(label)
    axes.set_title(title, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=_GREY, alpha=0.2)
    axes.set_ylim(top=room * axes.get_ylim()[1])  # room for the legend
    axes.legend(fontsize=8, frameon=False, labelcolor="linecolor")


class _figure:
    """A transparent figure of some panels. It is written when the block ends."""

    def __init__(self, path: Path, panels: int):
        self._path, self._panels = path, panels

    def __enter__(self) -> Any:
        import matplotlib
        from matplotlib.figure import Figure

        self._style = matplotlib.rc_context(_STYLE)
        self._style.__enter__()
        self._drawn = Figure(figsize=(5 * self._panels, 4.4), layout="constrained")
        self._drawn.patch.set_alpha(0)
        axes = self._drawn.subplots(1, self._panels)
        for one in axes:
            one.patch.set_alpha(0)
        return axes

    def __exit__(self, kind: Any, *more: Any) -> None:
        try:
            if kind is None:
                self._drawn.savefig(self._path, metadata={"Date": None} if self._path.suffix == ".svg" else None)
        finally:
            self._style.__exit__(kind, *more)
