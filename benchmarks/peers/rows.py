"""Turns the output of the launches into rows. Each state has a table, each library a line, and each time a column."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from bench.aims import MEMCPY
from bench.rows import Row, row
from listed import BY_NAME, COPY

YARDSTICKS = {"stall": MEMCPY, "whole": MEMCPY, "CPU": "CPU", "restore": "memcpy, restoring"}
HELD = "bytes held per byte of state: at rest, saving, restoring"

Line = Mapping[str, Any]


def rows_of(lines: Sequence[Line]) -> Iterator[Row]:
    """Make all rows. The rows of mlflash use all launches with the same state.

    Args:
        lines: of all launches. Each has "launch", "shape" and "who" (the library), and either "samples", or "first"
            and "memory".
    """
    for shape in dict.fromkeys(line["shape"] for line in lines):
        of_shape = [line for line in lines if line["shape"] == shape]
        memcpy = {line["launch"]: line["samples"] for line in of_shape if "samples" in line and line["who"] == MEMCPY}
        for who in (name for name in BY_NAME if any(line["who"] == name for line in of_shape)):
            where = {"case": f"{shape} (*: with a copy on the other node)"}
            what = f"{who} *" if BY_NAME[who].beside == COPY else who
            rounds = [line for line in of_shape if "samples" in line and line["who"] == who]
            for time, yardstick in YARDSTICKS.items() if rounds else ():
                seconds = np.concatenate([line["samples"][time] for line in rounds])
                over = np.concatenate([memcpy[line["launch"]][yardstick] for line in rounds])
                yield row(what, seconds, {MEMCPY: over}, column=time, **where)
            firsts = [line for line in of_shape if "first" in line and line["who"] == who]
            held = [f"{np.median([line['memory'][key] for line in firsts]):.2f}" for key in firsts[0]["memory"]]
            yield Row(what=what, column=HELD, note=", ".join(held), case=where["case"])
