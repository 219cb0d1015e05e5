"""Keeps results in files of JSON, describes the machine, and writes RESULTS.md."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from mlflash import __version__
from mlflash.tools.bench_report import cpu

from .aims import AIMS
from .launch import HOME
from .rows import Grid, Row, grids, markdown

PREAMBLE = """# Results

`make bench` writes this file. Ratios compare times of the same repetition: median (quartiles). [README.md](README.md)
explains the questions.
"""


class Result(NamedTuple):
    """The results of a question."""

    header: dict[str, Any]
    rows: list[Row]


def machine() -> dict[str, Any]:
    """Return the part of the header that is the same for all questions."""
    return {"mlflash": __version__, "commit": _commit(), "python": platform.python_version(),
            "torch": torch.__version__, "numpy": np.__version__, "cpu": cpu(), "cpus": os.cpu_count(),
            "when": datetime.date.today().isoformat()}  # fmt: skip


def _commit() -> str:
    """Return the commit, with "-dirty" if the code has changed since, or "" without git."""
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        return subprocess.run(command, cwd=HOME, capture_output=True, text=True, timeout=30).stdout.strip()
    except OSError:
        return ""


def keep(path: Path, header: Mapping[str, Any], rows: Sequence[Row]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"header": header, "rows": rows}, indent=1) + "\n")


def read(path: Path) -> Result:
    return Result(**json.loads(path.read_text()))


def report(results: Mapping[str, Result], missing: Mapping[str, str], quick: bool) -> str:
    """Write the text of RESULTS.md.

    Args:
        results: the results, by question.
        missing: why a question has no results, by question.
        quick: whether this was a quick run, whose numbers mean nothing.
    """
    common = dict.fromkeys(("mlflash", "commit", "python", "torch", "numpy", "cpu", "cpus", "when", "mpi"), "")
    for result in results.values():
        common |= {name: common[name] or value for name, value in result.header.items() if name in common}
    rows = [row for result in results.values() for row in result.rows]
    aims = Grid("", ["what", "aim", "measured", "reached"], list(_aims(rows)))
    parts = [PREAMBLE, *["**A quick run, which only shows that everything works.**\n"] * quick,
             _header(common), "## The aims of the design\n", markdown(aims)]  # fmt: skip
    for question, result in results.items():
        own = {name: value for name, value in result.header.items() if common.get(name) != value}
        parts += [f"## {question}\n", _header(own), *map(markdown, grids(result.rows))]
    parts += [f"## {question}\n\n{why}.\n" for question, why in missing.items() if question not in results]
    return "\n".join(parts)


def _header(header: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in header.items() if value != "") + ".\n"


def _aims(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yield a line for each aim, with all rows that show it."""
    for name, aim in AIMS.items():
        ratios = sorted(row["over"][aim.over][0] for row in rows if row.get("shows") == name)
        measured = f"{ratios[0]:.2f}" + f" to {ratios[-1]:.2f}" * (len(ratios) > 1) if ratios else "not measured"
        reached = f"{sum(ratio <= aim.most for ratio in ratios)} of {len(ratios)}" if ratios else ""
        yield [aim.what, f"≤ {aim.most:g} x {aim.over}", measured, reached]
