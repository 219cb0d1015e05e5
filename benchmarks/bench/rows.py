"""The common form of all results. A row has a time, its ratios to yardsticks of the same repetitions, and its aim."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

import numpy as np

from .aims import AIMS

Samples = Mapping[str, np.ndarray]  # by name: seconds of the slowest rank, shape (repetitions,)


class Row(TypedDict, total=False):
    """A line of a table.

    Attributes:
        what: the title.
        seconds: the median.
        samples: the seconds of each repetition.
        over: the median ratio, by yardstick.
        spread: the quartiles of that ratio, by yardstick.
        aim: a yardstick and the largest allowed multiple of it, or None.
        also: further aims.
        shows: the aim of bench/aims.py with which the row is compared.
        case: the table to which the row belongs, or "" if there is only one.
        column: the column, in a table with several times per line.
        note: a remark. A row that never ended, or that failed, has a note and no times.
    """

    what: str
    seconds: float
    samples: list[float]
    over: dict[str, float]
    spread: dict[str, list[float]]
    aim: tuple[str, float] | None
    also: list[tuple[str, float]]
    shows: str
    case: str
    column: str
    note: str


def row(
    what: str, samples: np.ndarray, over: Samples, shows: str = "", aim: tuple[str, float] | None = None, **more: Any
) -> Row:
    """Make a row.

    Args:
        what: the title.
        samples: seconds, shape ``(repetitions,)``.
        over: yardsticks by name. Each is the seconds of the same repetitions, or a number.
        shows: name of an aim of the design. Its yardstick must be in ``over``.
        aim: another aim.
        more: other fields.
    """
    ratios = {name: samples / yardstick for name, yardstick in over.items()}
    made = Row(
        what=what,
        seconds=float(np.median(samples)),
        samples=samples.tolist(),
        over={name: float(np.median(values)) for name, values in ratios.items()},
        spread={name: np.quantile(values, (0.25, 0.75)).tolist() for name, values in ratios.items()},
        aim=(AIMS[shows].over, AIMS[shows].most) if shows else aim,
    )
    if shows:
        made["shows"] = shows
    made.update(more)  # type: ignore[typeddict-item]
    return made


def aims_of(one: Row) -> list[tuple[str, float]]:
    """Return all aims of a row."""
    first = one.get("aim")
    return ([first] if first else []) + one.get("also", [])


def reached(one: Row) -> bool | None:
    """Return whether a row reaches all its aims, or None if it has no aim."""
    aims = aims_of(one)
    return all(one.get("over", {}).get(of, np.inf) <= most for of, most in aims) if aims else None
