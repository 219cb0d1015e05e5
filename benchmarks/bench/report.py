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

QUICK = "**This was a quick run. It only shows that everything works. Do not keep it as RESULTS.md.**\n"
HEADS = ["what", "best of others", "aim", "measured", "median (quartiles)", "reached", "why not"]


def report(header: Mapping[str, Any], results: Mapping[str, Result], missing: Mapping[str, str], quick: bool) -> str:
    """Write the whole report.

    Args:
        header: the header of the whole run.
        results: the results, by question.
        missing: why a question has no results, by question.
        quick: whether this was a quick run, whose numbers mean nothing.
    """
    asked = {one.question for one in AIMS.values()} - set(results)
    missing = {**{question: f"`{question}` did not run" for question in sorted(asked)}, **missing}
    rows = [(question, one) for question, result in results.items() for one in result.rows]
    parts = [
        "# Results\n",
        "`make bench` (benchmarks/run_all.py) writes this file. Do not edit it by hand. A ratio compares two times of "
        "the same repetition. The tables show the median and the quartiles of the ratios. The README.md of each folder "
        "says what its question means and how it is measured.\n",
        *([QUICK] if quick else []),
        header_in_words(header),
        "## The aims of the design\n",
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
    """Make a line for each row that shows an aim, and for each aim that no row shows."""
    for name, one in AIMS.items():
        first = [one.what, one.peer, in_words(one)]
        shown = [(question, row) for question, row in rows if row.get("shows") == name]
        if not shown:
            why = missing.get(one.question) or NOT_MEASURED.get(name) or "no row of this run shows it"
            yield [*first, "not measured", "", "", why]
        for question, row in shown:
            what = f"{question}: " + ", ".join(filter(None, (row.get("case"), row["what"], row.get("column"))))
            # A row may have other aims than those of the design. A row that never ended has no ratio.
            good = row.get("over", {}).get(one.over, math.inf) <= one.most
            figures = f"{ratio(row, one.over)} x {one.over}" if row.get("over") else row.get("note", "")
            yield [*first, what, figures, "yes" if good else "no", "" if good else why_not(row)]
            first = ["", "", ""]


def in_words(aim: Aim) -> str:
    return f"≤ {aim.most:g} x {aim.over}"
