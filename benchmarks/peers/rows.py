"""Make rows of what the launches said: seconds, and ratios to memcpy and to mlflash in the same rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from listed import BY_NAME, COPY, NONE

MEMCPY = "memcpy"
TIMES = ("stall", "whole", "CPU", "load", "restore")
YARDSTICKS = {"CPU": "CPU", "load": "memcpy, restoring", "restore": "memcpy, restoring"}  # of the same round

Row = dict[str, Any]
Samples = Mapping[str, Mapping[str, Sequence[float]]]


def rows_of(lines: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Make all rows.

    Args:
        lines: of all launches; each has "peer" and "shape", and "who" it is about: "samples", or "first" and "memory".
    """
    rows: list[Row] = []
    for peer, shape in dict.fromkeys((line["peer"], line["shape"]) for line in lines):
        mine = [line for line in lines if (line["peer"], line["shape"]) == (peer, shape)]
        place = {"peer": peer, "shape": shape}
        samples: Samples = {line["who"]: line["samples"] for line in mine if "samples" in line}
        for line in mine:
            if "first" in line:
                rows += [{**place, **row} for row in _of_first(line)]
        for who in samples:
            if who != MEMCPY:
                rows += [{**place, **row} for row in _of_rounds(who, samples)]
    return rows


def _of_rounds(who: str, samples: Samples) -> list[Row]:
    made = []
    for time in TIMES:
        values = np.array(samples[who][time])
        yardsticks = {MEMCPY: samples[MEMCPY][YARDSTICKS.get(time, MEMCPY)]}
        ours = "restore" if time == "load" else time
        yardsticks |= {name: samples[name][ours] for name in (NONE, COPY) if name in samples and name != who}
        ratios = {name: values / np.array(yardstick) for name, yardstick in yardsticks.items()}
        made.append({
            "who": who, "time": time, "what": f"{who}: {time}", "seconds": float(np.median(values)),
            "samples": values.tolist(), "aim": None,
            "over": {name: float(np.median(ratio)) for name, ratio in ratios.items()},
            "spread": {name: np.quantile(ratio, (0.25, 0.75)).tolist() for name, ratio in ratios.items()},
        })  # fmt: skip
    return made


def _of_first(line: Mapping[str, Any]) -> list[Row]:
    who, first, memory = line["who"], line["first"], line["memory"]
    times = [
        {"who": who, "time": f"first {key}", "what": f"{who}: first {key}", "seconds": first[key],
         "samples": [first[key]], "over": {}, "spread": {}, "aim": None}
        for key in ("open", "stall", "whole")
    ]  # fmt: skip
    return [*times, {"who": who, "what": f"{who}: bytes held per byte of state", "held": memory}]


def cells_of(rows: Sequence[Row], shape: str) -> dict[str, dict[str, Any]]:
    """Gather what a table says of each library with one state; ours is the median over all launches.

    Returns:
        By library and then by column: a ratio to memcpy with its spread, to the one of ours that does the same, and
        what its memory was.
    """
    found: dict[str, dict[str, Any]] = {}
    for who in (NONE, COPY, *(name for name in BY_NAME if name not in (NONE, COPY))):
        mine = [row for row in rows if row["shape"] == shape and row["who"] == who]
        if not any(row.get("time") == "whole" for row in mine):
            continue
        found[who] = {time: _merged([row for row in mine if row.get("time") == time]) for time in TIMES}
        firsts = ("first open", "first stall", "first whole")
        for first in firsts:
            found[who][first] = float(np.median([row["seconds"] for row in mine if row.get("time") == first]))
        held = [row["held"] for row in mine if "held" in row]
        found[who]["held"] = {key: float(np.median([one[key] for one in held])) for key in held[0]}
        beside = BY_NAME[who].beside
        found[who]["ours"] = {
            time: found[who][time]["over"].get(beside) for time in TIMES
        }  # fmt: skip
    return found


def _merged(rows: Sequence[Row]) -> dict[str, Any]:
    names = dict.fromkeys(name for row in rows for name in row["over"])
    return {
        "seconds": float(np.median([row["seconds"] for row in rows])),
        "over": {name: float(np.median([row["over"][name] for row in rows if name in row["over"]])) for name in names},
        "spread": [float(np.median([row["spread"][MEMCPY][i] for row in rows])) for i in (0, 1)],
    }
