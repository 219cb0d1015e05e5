"""Draws stacks as a flame graph of each thread. Callers are below, and the width of a box is its time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from stacks import Stacks

INK, WARM = "#808890", ("#c4704a", "#c48a4a", "#b05a3c")
LEAST = 0.01  # part of the whole width: narrower boxes are not drawn
LETTERS = 150  # number of letters that fit into the whole width
MOST_DEEP = 14


def draw(path: Path, trees: Mapping[str, Stacks]) -> None:
    """Draw the graphs, one below the other."""
    import matplotlib
    from matplotlib.figure import Figure

    style = {"svg.fonttype": "none", "svg.hashsalt": "mlflash", "text.color": INK, "font.size": 7}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(9, 2.6 * len(trees)), layout="constrained")
        for axes, (title, tree) in zip(figure.subplots(len(trees), squeeze=False)[:, 0], trees.items(), strict=True):
            axes.set_title(title, fontsize=9)
            axes.set_axis_off()
            boxes = list(_boxes(tree, 0, 0))
            axes.set_xlim(0, max(1, tree.seen))
            axes.set_ylim(0, max((depth for depth, _, _ in boxes), default=0) + 1)
            for depth, start, one in boxes:
                axes.barh(depth + 0.5, one.seen, 0.92, start, color=WARM[(depth + len(one.name)) % len(WARM)])
                letters = int(LETTERS * one.seen / tree.seen)
                if letters > 3:
                    axes.text(start, depth + 0.5, f" {one.name[:letters]}", va="center", color="white")
        kind = {"Date": None, "Creator": None} if path.suffix == ".svg" else {}
        figure.savefig(path, transparent=True, metadata=kind)


def _boxes(tree: Stacks, depth: int, start: float, whole: int = 0) -> Iterator[tuple[int, float, Stacks]]:
    whole = whole or tree.seen
    for one in sorted(tree.calls.values(), key=lambda one: one.name):
        if one.seen >= LEAST * whole and depth < MOST_DEEP:
            yield depth, start, one
            yield from _boxes(one, depth + 1, start, whole)
        start += one.seen
