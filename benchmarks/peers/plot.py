"""Draw stall and time until whole of each library, in multiples of memcpy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from listed import BY_NAME, COPY
from rows import MEMCPY, Row, cells_of

matplotlib.use("svg")
import matplotlib.pyplot as plt

INK = "#808080"  # readable on white and on black
LEAST = 0.5  # multiples of memcpy: where bars begin
STALL, WHOLE = "#d9822b", "#3f8fd2"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write one panel per state; bars from no time to whole, the part that keeps training waiting in front."""
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    style = {"text.color": INK, "axes.edgecolor": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK,
             "font.size": 9, "svg.hashsalt": "mlflash", "svg.fonttype": "none"}  # fmt: skip
    with plt.rc_context(style):
        figure, axes = plt.subplots(1, len(shapes), sharey=True, squeeze=False, figsize=(3.6 * len(shapes), 3.6))
        for axis, shape in zip(axes[0], shapes, strict=True):
            found = cells_of(rows, shape)
            names = [who + (" *" if BY_NAME[who].beside == COPY else "") for who in found]
            whole, stall = ([of[time]["over"][MEMCPY] for of in found.values()] for time in ("whole", "stall"))
            axis.barh(names, whole, color=WHOLE, label="until whole", height=0.7)
            axis.barh(names, stall, color=STALL, label="training waits", height=0.35)
            axis.set(xscale="log", xlabel="multiples of memcpy", title=shape, xlim=(LEAST, 2 * max(whole)))
            axis.axvline(1, color=INK, linewidth=0.8)
            axis.spines[["top", "right"]].set_visible(False)
        axes[0][0].invert_yaxis()
        figure.legend(*axes[0][0].get_legend_handles_labels(), loc="lower right", ncols=2, frameon=False, fontsize=8)
        figure.text(0.01, 0.01, "* with a copy on the other node", fontsize=8)
        figure.tight_layout(rect=(0, 0.05, 1, 1))
        figure.savefig(path, transparent=True, metadata={"Date": None})
        plt.close(figure)
