"""Draw the table of run.py: a panel for each place, a mark for each way and main thread, readable in light and dark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

YARDSTICK = "memcpy + Sendrecv"
COLORS = {"idle": "#2a9d5c", "python": "#d9822b", "matmul": "#3f7fd0"}
GREY = "#808080"


def draw(header: dict[str, Any], rows: list[dict[str, Any]], path: Path) -> None:
    """Draw ratios with their quartiles; what never ended stands at the right edge as a cross."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.fonttype": "none", "font.size": 9, "axes.edgecolor": GREY, "text.color": GREY,
                         "axes.labelcolor": GREY, "xtick.color": GREY, "ytick.color": GREY})  # fmt: skip
    rows = [row for row in rows if not row.get("failed") and row["chunk MiB"] == rows[0]["chunk MiB"]]
    cases = list(dict.fromkeys(row["case"] for row in rows))
    ways = list(dict.fromkeys(row["what"] for row in rows))[::-1]
    edge = 2 * max(row["over"][YARDSTICK] for row in rows if "over" in row)
    figure, panels = plt.subplots(1, len(cases), figsize=(2 + 3.2 * len(cases), 3.6), sharey=True, squeeze=False)
    for panel, case in zip(panels[0], cases, strict=True):
        for row in (row for row in rows if row["case"] == case):
            shift = 0.2 * (list(COLORS).index(row["column"]) - 1)
            y, color = ways.index(row["what"]) - shift, COLORS[row["column"]]
            if row.get("never"):
                panel.plot([edge], [y], "x", color=color)
                continue
            panel.plot(row["spread"][YARDSTICK], [y, y], "-", color=color)
            panel.plot([row["over"][YARDSTICK]], [y], "o", color=color, markersize=4)
        panel.axvline(1, color=GREY, linewidth=0.7, linestyle=":")
        panel.set(xscale="log", title=case, xlabel=f"time / ({YARDSTICK}); x: never")
        panel.set_yticks(range(len(ways)), ways)
    for name, color in COLORS.items():
        panels[0][0].plot([], [], "o", color=color, label=f"main thread: {name}")
    figure.suptitle(header.get("mpi", ""))
    figure.legend(loc="lower center", ncols=3, frameon=False)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(path, transparent=True, metadata={"Date": None})
