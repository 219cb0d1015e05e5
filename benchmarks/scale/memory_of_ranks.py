"""Measures the memory of trainer, zygote and courier of a rank, and how it grows with the ranks of the job.

    python benchmarks/scale/memory_of_ranks.py [--ranks 4 8 16 32] [--kinds process bare thread] [--json FILE]

It starts real processes on this machine under MPICH. Each rank counts as a node of its own. Its state is 4 KiB. With
"process" the courier of a Checkpointer is a process, with "thread" it is a thread of the trainer. A "bare" courier only
creates the same communicators, so its memory is MPI's. All processes are killed after --deadline-s.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scale import counted  # noqa: E402

# Without the first two, waiting ranks take the cores from working ones. The last selects the transport between nodes.
ENVIRONMENT = {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "true", "MPIR_CVAR_POLLS_BEFORE_YIELD": "10", "OMP_NUM_THREADS": "1",
               "UCX_TLS": "tcp,self"}  # fmt: skip
KINDS = ("process", "bare", "thread")
EXTRAPOLATED = (1024, 16_384, 131_072)
COUNTED = {("copy", "p2p"): (1024, 16_384), ("copy", "rma"): (1024, 16_384), ("xor:8", "p2p"): (1024, 4096),
           ("rs:6+2", "rma"): (1024, 4096)}  # fmt: skip
_SCRIPT = Path(__file__).with_name("memory_rank.py")
_SHOWN = ("Private", "Pss", "threads", "descriptors")


@dataclasses.dataclass(frozen=True)
class Line:
    """A quantity against the ranks of the job, as a straight line.

    Attributes:
        at_none: value at no rank.
        of_a_rank: growth with each rank of the job.
    """

    at_none: float
    of_a_rank: float

    def at(self, ranks: int) -> float:
        """Give the quantity at this number of ranks."""
        return self.at_none + self.of_a_rank * ranks


def fit(values: Sequence[tuple[int, float]]) -> Line:
    """Fit a line to pairs of ranks and quantity, by least squares."""
    slope, start = statistics.linear_regression(*zip(*values, strict=True))
    return Line(start, slope)


def median_of(lines: Iterable[dict[str, Any]], name: str) -> float:
    """Give the median over ranks."""
    return statistics.median(line[name] for line in lines)


def measure(args: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    """Start all jobs, one after the other. Gives the lines of all ranks, and what went wrong."""
    from bench.launch import launch

    end = time.monotonic() + args.deadline_s
    found: list[dict[str, Any]] = []
    wrong = []
    for ranks in args.ranks:
        for kind in args.kinds:
            left_s = end - time.monotonic()
            if left_s < args.least_s:
                wrong.append(f"{ranks} ranks, {kind}: not started, no time left")
                continue
            why, lines = launch(ranks, _SCRIPT, [kind], left_s, environment=ENVIRONMENT)
            found += lines
            wrong += [f"{ranks} ranks, {kind}: {why}"] * bool(why)
    return found, wrong


def grouped(lines: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str, str, dict[int, list[dict[str, Any]]]]]:
    """Yield kind, process, stage, and the lines of all ranks by size of the job."""
    for key in dict.fromkeys((line["kind"], line["process"], line["stage"]) for line in lines):
        by_ranks: dict[int, list[dict[str, Any]]] = {}
        for line in lines:
            if (line["kind"], line["process"], line["stage"]) == key:
                by_ranks.setdefault(line["ranks"], []).append(line)
        yield *key, by_ranks


def tables(lines: Sequence[dict[str, Any]]) -> list[Any]:
    """Create a table of medians, and a table of lines through them."""
    from bench.table import Grid

    sizes = sorted({line["ranks"] for line in lines})
    medians, slopes = [], []
    for kind, process, stage, by_ranks in grouped(lines):
        cells = [" / ".join(f"{median_of(by_ranks[n], name):,.0f}" for name in _SHOWN) if n in by_ranks else ""
                 for n in sizes]  # fmt: skip
        medians.append([kind, process, stage, *cells])
        if len(by_ranks) > 1:
            private, pss = (fit([(n, median_of(those, name)) for n, those in sorted(by_ranks.items())])
                            for name in ("Private", "Pss"))  # fmt: skip
            far = [f"{private.at(ranks) / 1024:,.0f}" for ranks in EXTRAPOLATED]
            slopes.append([kind, process, stage, f"{private.of_a_rank:.2f}", f"{pss.of_a_rank:.2f}", *far])
    heads = ["kind", "process", "after"]
    return [
        Grid("Medians over ranks: private KiB / Pss KiB / threads / descriptors",
             [*heads, *(f"{n} ranks" for n in sizes)], medians),
        Grid("Growth with each rank of the job, and private MiB extrapolated on that line",
             [*heads, "private KiB", "Pss KiB", *(f"{ranks:,} ranks" for ranks in EXTRAPOLATED)], slopes),
    ]  # fmt: skip


def counted_table() -> Any:
    """Create a table of what is counted in the simulation."""
    from bench.table import Grid

    rows = []
    for (scheme, transport), sizes in COUNTED.items():
        small, large = (counted.count(ranks, scheme, transport) for ranks in sizes)
        growth = fit([(sizes[0], small.tables_nbytes), (sizes[1], large.tables_nbytes)])
        rows.append([
            f"{scheme}, {transport}", f"{small.of_communicators()}; {large.of_communicators()}",
            small.of_windows() or "none", ", ".join(small.threads), f"{growth.of_a_rank:.0f}",
            *(f"{growth.at(ranks) / 1e6:.1f}" for ranks in EXTRAPOLATED),
        ])  # fmt: skip
    return Grid("Communicators, windows and tables, counted on one rank in simulated jobs of two sizes",
                ["scheme", "communicators of ranks", "windows of ranks", "threads", "tables, B for each rank",
                 *(f"MB at {ranks:,}" for ranks in EXTRAPOLATED)], rows)  # fmt: skip


def main() -> int:
    from bench.results import machine
    from bench.table import show

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[4, 8, 16, 32], help="sizes of the job, even numbers")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["process", "bare"], help="what the ranks do")
    parser.add_argument("--deadline-s", type=float, default=280.0, help="seconds after which all processes are killed")
    parser.add_argument("--least-s", type=float, default=10.0, help="start no job if fewer seconds are left")
    parser.add_argument("--json", type=Path, help="write the memory of each process to this file")
    args = parser.parse_args()
    begun = time.monotonic()
    found, wrong = measure(args)
    show({**machine(), "seconds": round(time.monotonic() - begun), "went wrong": "; ".join(wrong)},
         [counted_table(), *tables(found)])  # fmt: skip
    if args.json is not None:
        args.json.write_text("".join(json.dumps(line) + "\n" for line in found))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
