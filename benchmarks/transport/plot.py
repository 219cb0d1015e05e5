"""Draws the table of run.py, readable in light and dark: a panel per place, and a mark per way and main thread."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.results import read  # noqa: E402
from bench.rows import Row  # noqa: E402

YARDSTICK = "memcpy + Sendrecv"
COLORS = {"idle": "#2a9d5c", "python": "#d9822b", "matmul": "#3f7fd0"}
GREY = "#808080"


def draw(title: str, rows: Sequence[Row], path: Path) -> None:
    """Draw ratios with their quartiles. A way that never ended is a cross at the right edge."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.fonttype": "none", "font.size": 9, "axes.edgecolor": GREY, "text.color": GREY,
                         "axes.labelcolor": GREY, "xtick.color": GREY, "ytick.color": GREY})  # fmt: skip
    cases = list(dict.fromkeys(row["case"] for row in rows))
    ways = list(dict.fromkeys(row["what"] for row in rows))[::-1]
    edge = 2 * max(row["over"][YARDSTICK] for row in rows if "over" in row)
    figure, panels = plt.subplots(1, len(cases), figsize=(2 + 3.2 * len(cases), 3.6), sharey=True, squeeze=False)
    for panel, case in zip(panels[0], cases, strict=True):
        for shift, (main_does, color) in zip((-0.2, 0, 0.2), COLORS.items(), strict=True):
            here = [row for row in rows if (row["case"], row["column"]) == (case, main_does)]
            ended = [row for row in here if "over" in row]
            heights = [ways.index(row["what"]) - shift for row in ended]
            lows, highs = ([row["spread"][YARDSTICK][end] for row in ended] for end in (0, 1))
            panel.hlines(heights, lows, highs, colors=color, clip_on=False)
            panel.plot(
                [row["over"][YARDSTICK] for row in ended], heights, "o", color=color, markersize=4, clip_on=False
            )
            never = [ways.index(row["what"]) - shift for row in here if row.get("note", "").startswith("never")]
            panel.plot([edge] * len(never), never, "x", color=color, clip_on=False)
        panel.axvline(1, color=GREY, linewidth=0.7, linestyle=":")
        panel.set(xscale="log", title=case.partition(", chunks")[0], xlabel=f"time / ({YARDSTICK}); x: never")
        panel.minorticks_off()
        panel.tick_params(left=False)
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_yticks(range(len(ways)), ways)
    for name, color in COLORS.items():
        panels[0][0].plot([], [], "o", color=color, label=f"main thread: {name}")
    figure.suptitle(title)
    figure.legend(loc="lower center", ncols=3, frameon=False)
    width = figure.get_figwidth()
    figure.subplots_adjust(left=1.3 / width, right=1 - 0.2 / width, bottom=0.25, top=0.88, wspace=0.1)
    figure.savefig(path, transparent=True, metadata={"Date": None})
    drawn = re.sub(r"<!--.*?-->|(?<=\d\.\d\d)\d+|(?<=\n)\s+", "", path.read_text())
    path.write_text(re.sub(r"\s+(?=/?>)", "", drawn))  # without comments and with two digits the file is smaller


def main() -> None:
    """Draw the results of several runs: ``plot.py FILE.svg RUN.json...``."""
    rows: list[Row] = []
    for path in map(Path, sys.argv[2:]):
        run = read(path)
        mpi = run.header["mpi"].rpartition(" ")[0]
        for row in run.rows:
            row["case"] = f"{mpi}, {row['case']}"
        rows += run.rows
    draw("", sorted(rows, key=lambda row: row["case"]), Path(sys.argv[1]))


if __name__ == "__main__":
    main()
