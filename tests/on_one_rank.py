"""Run tests/mpi on this rank: one report per rank, and only the first rank prints unless another one fails."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path

import pytest
from mpi4py import MPI


def main() -> int:
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    report = Path(os.environ["MLFLASH_TEST_REPORTS"], f"mpi-{size}-rank{rank}.xml")
    here = Path(__file__).parent / "mpi"
    arguments = [
        "--only-mpi",
        "--timeout",
        "100",
        "--color=no",
        "--junitxml",
        str(report),
        str(here),
        "-r",
        "fE",
        *sys.argv[1:],
    ]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed) if rank else contextlib.nullcontext():
        code = int(pytest.main(arguments))
    if rank and code:
        print(f"--- rank {rank} ---\n{printed.getvalue()}", flush=True)
    return code


if __name__ == "__main__":
    sys.path.pop(0)  # the tests import the installed package, not what lies beside this file
    if code := main():
        MPI.COMM_WORLD.Abort(code)
