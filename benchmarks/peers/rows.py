"""Turns the output of the launches into rows. Each state has a table, each library a line, and each time a column."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from bench.aims import MEMCPY
from bench.rows import Row, Samples, row
from listed import BY_NAME, COPY, NONE

TIMES = ("stall", "whole", "CPU", "load", "restore")
YARDSTICKS = {"CPU": "CPU", "load": "memcpy, restoring", "restore": "memcpy, restoring"}  # each from the same round
FIRST, HELD = "stall of the first save", "bytes held per byte of state: at rest, saving, restoring"
OURS = "mlflash"  # mlflash without or with a copy, like the library

Line = Mapping[str, Any]


def rows_of(lines: Sequence[Line]) -> Iterator[Row]:
    """Make all rows. The rows of mlflash use all launches with the same state.

    Args:
        lines: of all launches. Each has "launch", "shape" and "who" (the library), and either "samples", or "first"
            and "memory".
    """
    for shape in dict.fromkeys(line["shape"] for line in lines):
        mine = [line for line in lines if line["shape"] == shape]
        for who in (name for name in BY_NAME if any(line["who"] == name for line in mine)):
            what = f"{who} *" if BY_NAME[who].beside == COPY else who
            case = f"{shape} (*: with a copy on the other node)"
            rounds = [line for line in mine if "samples" in line and line["who"] == who]
            for time in TIMES if rounds else ():
                values, over = _of(time, rounds, mine)
                yield row(what, values, over, case=case, column=time)
            firsts = [line for line in mine if "first" in line and line["who"] == who]
            yield row(what, np.array([line["first"]["stall"] for line in firsts]), {}, case=case, column=FIRST)
            held = [f"{np.median([line['memory'][key] for line in firsts]):.2f}" for key in firsts[0]["memory"]]
            yield Row(what=what, case=case, column=HELD, note=", ".join(held))


def _of(time: str, rounds: Sequence[Line], mine: Sequence[Line]) -> tuple[np.ndarray, Samples]:
    """Return the seconds of one library, and the yardsticks of the same rounds."""
    who = rounds[0]["who"]
    over = {MEMCPY: _beside(MEMCPY, YARDSTICKS.get(time, MEMCPY), rounds, mine)}
    if who not in (NONE, COPY):
        over[OURS] = _beside(BY_NAME[who].beside, "restore" if time == "load" else time, rounds, mine)
    return np.concatenate([line["samples"][time] for line in rounds]), over


def _beside(who: str, time: str, rounds: Sequence[Line], mine: Sequence[Line]) -> np.ndarray:
    said = {line["launch"]: line["samples"][time] for line in mine if "samples" in line and line["who"] == who}
    return np.concatenate([said[line["launch"]] for line in rounds])


def together(runs: Sequence[Sequence[Row]]) -> list[Row]:
    """Combine the rows of several runs. A row that several runs have gets the median of their numbers."""
    same: dict[tuple[str, str, str], list[Row]] = {}
    for one in (one for rows in runs for one in rows):
        same.setdefault((one.get("case", ""), one["what"], one.get("column", "")), []).append(one)
    return [_median(rows) if "over" in rows[0] else rows[0] for rows in same.values()]


def _median(rows: Sequence[Row]) -> Row:
    made = rows[0].copy()
    made["seconds"] = float(np.median([one["seconds"] for one in rows]))
    made["samples"] = [value for one in rows for value in one["samples"]]
    made["over"] = {name: float(np.median([one["over"][name] for one in rows])) for name in made["over"]}
    made["spread"] = {name: np.median([one["spread"][name] for one in rows], axis=0).tolist() for name in made["over"]}
    return made
