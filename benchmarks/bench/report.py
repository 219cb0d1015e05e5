"""Writes the results of all questions to RESULTS.md."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .aims import AIMS, Aim
from .launch import HOME
from .results import Result
from .rows import Row
from .table import Grid, grids, header_in_words, markdown, ratio
from .why_not import NOT_MEASURED, why_not

QUICK = "**A quick run, which only shows that everything works. Not to be kept as RESULTS.md.**\n"
HEADS = ["what", "best of others", "aim", "measured", "median (quartiles)", "reached", "why not"]


def report(header: Mapping[str, Any], results: Mapping[str, Result], missing: Mapping[str, str], quick: bool) -> str:
    """Write the whole report.

    Args:
        header: of the whole run.
        results: by question.
        missing: why a question has no results, by question.
        quick: whether the run was quick, so that the numbers mean nothing.
    """
    asked = {one.question for one in AIMS.values()} - set(results)
    missing = {**{question: f"`{question}` was not asked" for question in sorted(asked)}, **missing}
    rows = [(question, one) for question, result in results.items() for one in result.rows]
    parts = [
        "# Results\n",
        "Written by `make bench` (benchmarks/run_all.py), not by hand. Ratios are made within one repetition of one "
        "run; given are their median and quartiles. What each question means, and how it is measured, is in the "
        "README.md of its folder.\n",
        *([QUICK] if quick else []),
        header_in_words(header),
        "## What was to be reached\n",
        markdown(Grid("", HEADS, list(aims(rows, missing)))),
    ]
    for question, result in results.items():
        parts += [f"## {question}\n", header_in_words(result.header)]
        if (HOME / question / "plot.svg").exists() and not quick:
            parts.append(f"![plot]({question}/plot.svg)\n")
        parts += map(markdown, grids(result.rows))
    parts += [f"## {question}\n\n{why}.\n" for question, why in missing.items() if question not in results]
    return "\n".join(parts)


def aims(rows: Sequence[tuple[str, Row]], missing: Mapping[str, str]) -> Iterable[list[str]]:
    """A line for each row that shows an aim, and for each aim that no row shows."""
    for name, one in AIMS.items():
        first = [one.what, one.peer, in_words(one)]
        shown = [(question, row) for question, row in rows if row.get("shows") == name]
        if not shown:
            why = missing.get(one.question) or NOT_MEASURED.get(name) or "no row of this run shows it"
            yield [*first, "not measured", "", "", why]
        for question, row in shown:
            what = f"{question}: " + ", ".join(filter(None, (row.get("case"), row["what"], row.get("column"))))
            # A row may have further aims, which are not the design's; and none of it where it never came to an end.
            good = row.get("over", {}).get(one.over, math.inf) <= one.most
            figures = f"{ratio(row, one.over)} x {one.over}" if row.get("over") else row.get("note", "")
            yield [*first, what, figures, "yes" if good else "no", "" if good else why_not(row)]
            first = ["", "", ""]


def in_words(aim: Aim) -> str:
    return f"≤ {aim.most:g} x {aim.over}"
