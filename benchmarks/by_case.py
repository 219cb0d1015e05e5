"""Benchmarks whose ranks time several cases, each beside a memcpy and a peer: run them, and print a table for each."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from launch import keep, launch
from rich.console import Console
from rich.table import Table


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Make a parser with the arguments that all of them take."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="how often, after one to warm up; the median counts")
    parser.add_argument("--timeout-s", type=float, default=900, help="the ranks are killed after so many seconds")
    parser.add_argument("--quick", action="store_true", help="small and few: see whether it works, in under 30 s")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    return parser


def run(
    args: argparse.Namespace, script: Path, arguments: Sequence[int], columns: Sequence[str], peer: str = ""
) -> int:
    """Run a script on ``args.ranks`` ranks and print what it wrote.

    The first of its lines says where it ran; each other one has "case", "what", and by column "seconds", "over memcpy"
    and, where there is a peer, "over PEER".

    Returns:
        The exit status.
    """
    before = os.getloadavg()[0]
    ended, lines = launch(args.ranks, script, list(map(str, arguments)), args.timeout_s)
    header = {
        **(lines[0] if lines else {}),
        "cpus": os.cpu_count(),
        "load average before": before,
        "load average after": os.getloadavg()[0],
        "torch": torch.__version__,
        **{name: value for name, value in vars(args).items() if name != "json"},
    }
    _show(header, lines[1:], columns, peer)
    return keep(args.json, header, lines[1:], ended)


def _show(header: dict[str, Any], rows: list[dict[str, Any]], columns: Sequence[str], peer: str) -> None:
    console = Console(width=None if sys.stdout.isatty() else 130)
    for name, value in header.items():
        console.print(f"{name}: {value}", highlight=False)
    over = f"/ memcpy, / {peer}" if peer else "/ memcpy"
    for case, of_case in groupby(rows, key=lambda row: row["case"]):
        table = Table("what", *(f"{name}, s" for name in columns), title=f"{case}: median seconds, {over}")
        for column in table.columns[1:]:
            column.justify = "right"
        for row in of_case:
            table.add_row(row["what"], *(_cell(row, name, peer) if name in row["seconds"] else "" for name in columns))
        console.print(table)


def _cell(row: dict[str, Any], column: str, peer: str) -> str:
    found = f"{row['seconds'][column]:.4f} {row['over memcpy'][column]:6.2f}x"
    theirs = row.get(f"over {peer}", {})
    return f"{found} {theirs[column]:5.2f}x" if column in theirs else found
