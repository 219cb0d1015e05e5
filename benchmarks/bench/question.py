"""The part that every run.py shares: it reads arguments, starts ranks, and prints and keeps their results."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .launch import Part, launch
from .results import keep, machine
from .rows import Row, grids, show

# Arguments that the header does not repeat.
NOT_SETTINGS = ("json", "timeout_s", "list", "peers", "shapes", "place", "only", "disk", "pythons")


class Question:
    """A question, from its arguments to its results.

    Args:
        args: from `parser_of`. ``timeout_s`` is the limit of all launches together.

    Attributes:
        rows: the results.
        header: entries that say what was measured.
        wrong: what did not run, and contradictions in the results.
    """

    def __init__(self, args: argparse.Namespace):
        self.args, self.rows, self.header, self.wrong = args, list[Row](), dict[str, Any](), list[str]()
        self._start_s, self._load = time.monotonic(), os.getloadavg()[0]

    def run(self, parts: Iterable[Part]) -> int:
        """Start the ranks, one launch after the other. Return the exit status."""
        for part in parts:
            left_s = self.args.timeout_s - (time.monotonic() - self._start_s)
            why, lines = launch(part, self.args.repetitions, max(1.0, left_s))
            self.add(lines)
            self.wrong += [f"{why}; the tables have only the rows that its ranks wrote before"] * bool(why)
        return self.finish()

    def add(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Add rows, and entries of the header."""
        for line in lines:
            if "what" in line:
                self.rows.append(line)  # type: ignore[arg-type]
            else:
                self.header |= line

    def finish(self) -> int:
        """Print and keep the results. Return the exit status."""
        settings = {name.replace("_", " "): _plain(value) for name, value in vars(self.args).items()
                    if name not in NOT_SETTINGS and value not in (False, None)}  # fmt: skip
        header = machine() | settings | {
            "load average": f"{self._load:.1f} to {os.getloadavg()[0]:.1f}",
            "went wrong": "; ".join(self.wrong), **self.header,
        }  # fmt: skip
        show({name: value for name, value in header.items() if value != ""}, grids(self.rows))
        if self.args.json is not None:
            keep(self.args.json, header, self.rows)
        for why in self.wrong:
            print(why, file=sys.stderr)
        return 1 if self.wrong or not self.rows else 0


def parser_of(doc: str | None, repetitions: int, timeout_s: float = 240) -> argparse.ArgumentParser:
    """Make a parser with the arguments of all questions."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=repetitions, help="number of repetitions; the median counts")
    parser.add_argument("--timeout-s", type=float, default=timeout_s, help="seconds after which the ranks are killed")
    parser.add_argument("--quick", action="store_true", help="a run of under 30 s, only to check that everything works")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    return parser


def not_measured(args: argparse.Namespace, why: str) -> int:
    """Say, and keep, that this machine lacks what the question needs. Return the exit status."""
    print(f"nothing was measured: {why}")
    if args.json is not None:
        keep(args.json, {**machine(), "status": why}, [])
    return 0


def _plain(value: Any) -> Any:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "; ".join(map(str, value))
    return value if isinstance(value, (bool, int, float, str)) else str(value)
