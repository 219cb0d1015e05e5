"""The part that every run.py shares: it reads arguments, starts ranks, and prints, draws and keeps their results."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .aims import MEMCPY
from .launch import launch
from .plots import draw
from .results import Result, fill_readme, keep, machine
from .rows import Row
from .table import grids, show

UNTOLD = ("json", "plot", "readme", "timeout_s", "again", "list")


class Part(NamedTuple):
    """One launch.

    Attributes:
        ranks: number of ranks.
        script: the program of a rank.
        arguments: the arguments of the program.
        per_node: ranks on each emulated node.
        python: the Python that runs the ranks.
    """

    ranks: int
    script: Path
    arguments: Sequence[object]
    per_node: int = 1
    python: str = sys.executable


def parser_of(doc: str | None, timeout_s: float | None, repetitions: int | None) -> argparse.ArgumentParser:
    """Make a parser with the arguments of all questions. With None, the parser does not have that argument."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if repetitions is not None:
        parser.add_argument(
            "--repetitions", type=int, default=repetitions, help="number of repetitions; the median counts"
        )
    if timeout_s is not None:
        parser.add_argument(
            "--timeout-s", type=float, default=timeout_s, help="seconds after which the ranks are killed"
        )
    parser.add_argument("--quick", action="store_true", help="a run of under 30 s, only to check that everything works")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--plot", type=Path, help="draw the ratios into this file (needs matplotlib)")
    parser.add_argument("--readme", action="store_true", help="write table and plot into the folder of this benchmark")
    return parser


class Begun(NamedTuple):
    """The start of a question on the monotonic clock, and the load average at that time."""

    start_s: float
    load: float


def begin(args: argparse.Namespace) -> Begun:
    """Note the time and the load, before anything is timed."""
    if args.readme and args.quick:
        sys.exit("the results of a quick run must not go to README.md: use --readme without --quick")
    return Begun(time.monotonic(), os.getloadavg()[0])


def in_eights(text: str) -> int:
    """Read a number of MiB that tensors of 8 MiB add up to."""
    mib = int(text)
    if mib < 8 or mib % 8:
        raise argparse.ArgumentTypeError("must be a multiple of 8")
    return mib


def run(
    args: argparse.Namespace,
    parts: Iterable[Part],
    yardstick: str = MEMCPY,
    drawn: Callable[[Row], bool] = lambda row: True,
) -> int:
    """Start the ranks, one launch after the other, and print what they wrote.

    Args:
        args: from `parser_of`. ``timeout_s`` is the limit of all launches together.
        parts: the launches.
        yardstick: the yardstick of the plot.
        drawn: selects the rows of the plot.

    Returns:
        The exit status.
    """
    begun = begin(args)
    lines: list[dict[str, Any]] = []
    ended: list[str] = []
    for part in parts:
        left_s = args.timeout_s - (time.monotonic() - begun.start_s)
        arguments = list(map(str, part.arguments))
        why, found = launch(part.ranks, part.script, arguments, max(1.0, left_s), part.per_node, python=part.python)
        lines += found
        ended += [f"{why}; the table has only the rows that its ranks wrote before"] * bool(why)
    rows: list[Row] = [line for line in lines if "what" in line]  # type: ignore[misc]
    said: dict[str, Any] = {}
    for line in lines:
        said |= {} if "what" in line else line
    return finish(args, begun, said, rows, ended, lambda path: draw(path, list(filter(drawn, rows)), yardstick))


def finish(
    args: argparse.Namespace,
    begun: Begun,
    said: Mapping[str, Any],
    rows: Sequence[Row],
    wrong: Sequence[str],
    plot: Callable[[Path], object],
) -> int:
    """Print, draw and keep the results.

    Args:
        args: from `parser_of`.
        begun: from `begin`.
        said: further entries of the header. They replace entries of the same name.
        rows: the results.
        wrong: what did not run, and contradictions in the results.
        plot: draws the results into a file.

    Returns:
        The exit status.
    """
    folder = Path(sys.argv[0]).resolve().parent
    asked = {name.replace("_", " "): _plain(value) for name, value in vars(args).items()
             if name not in UNTOLD and value is not False and value is not None}  # fmt: skip
    header = machine() | asked | {
        "load average before": begun.load, "load average after": os.getloadavg()[0],
        "seconds": round(time.monotonic() - begun.start_s), "went wrong": "; ".join(wrong), **said,
    }  # fmt: skip
    show({name: value for name, value in header.items() if value != ""}, grids(rows))
    if args.json is not None:
        keep(args.json, header, rows)
    path = folder / "plot.svg" if args.readme else args.plot
    if path is not None:
        plot(path)
    if args.readme:
        fill_readme(folder / "README.md", Result(header, list(rows)))
    for why in wrong:
        print(f"{folder.name}: {why}", file=sys.stderr)
    return 1 if wrong or not rows else 0


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return "; ".join(map(str, value))
    return value if isinstance(value, (bool, int, float, str)) else str(value)
