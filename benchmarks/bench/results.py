"""Writes results to files: JSON to keep, the table of a README, and a description of the machine."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from mlflash import __version__

from .launch import HOME
from .rows import Row
from .table import grids, header_in_words, markdown

KEPT = HOME / "results"  # not under version control
BEGIN, END = "<!-- measured: written by run.py --readme -->", "<!-- end of what was measured -->"
CODE = ("mlflash", "adapters", "benchmarks", ":!*.md", ":!*.svg")


class Result(NamedTuple):
    """The results of a question."""

    header: dict[str, Any]
    rows: list[Row]


def machine() -> dict[str, Any]:
    """Return the part of the header that is the same for all questions."""
    found = {"mlflash": __version__, "commit": commit(), "python": platform.python_version(),
             "torch": torch.__version__, "numpy": np.__version__, "cpu": _cpu(), "cpus": os.cpu_count(),
             "when": datetime.date.today().isoformat()}  # fmt: skip
    return {name: value for name, value in found.items() if value}


def commit() -> str:
    """Return the last commit that changed the code, with a + if the code has changed since, or "" without git."""
    try:
        name = _git("log", "-1", "--abbrev=10", "--format=%h", "--", *CODE)
        return name + ("+" if _git("status", "--porcelain", "--", *CODE) else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(*arguments: str) -> str:
    found = subprocess.run(["git", *arguments], cwd=HOME.parent, capture_output=True, text=True, timeout=30, check=True)
    return found.stdout.strip()


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.machine()


def keep(path: Path, header: Mapping[str, Any], rows: Sequence[Row]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"header": header, "rows": rows}, indent=1) + "\n")


def read(path: Path) -> Result:
    found = json.loads(path.read_text())
    return Result(found["header"], found["rows"])


def fill_readme(path: Path, result: Result) -> None:
    """Put the tables between the two marks of a README. Without marks, do nothing."""
    before, begin, rest = path.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        return
    tables = "\n".join(map(markdown, grids(result.rows)))
    plot = "![plot](plot.svg)\n\n" if path.with_name("plot.svg").exists() else ""
    path.write_text(f"{before}{BEGIN}\n\n{header_in_words(result.header)}\n{plot}{tables}\n{END}{after}")
