"""Run a folder of tests on this rank: one report per rank, and only the first rank prints unless another one fails.

Usage: on_one_rank.py FOLDER [PYTEST ARGUMENTS...]. MPI is not imported before `main`: the checkpoint processes of
PyTorch import this file, too, and must not touch MPI.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path

from waiting import take

_SAID_S = 3  # launchers lose what was printed right before an abort, and other ranks may still have to say what failed


def main() -> int:
    import pytest
    from mpi4py import MPI

    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    folder, *more = sys.argv[1:]
    report = Path(os.environ["MLFLASH_TEST_REPORTS"], f"{folder}-{size}-rank{rank}.xml")
    arguments = [
        "--only-mpi",
        "--timeout",
        "100",
        "-o",
        "faulthandler_timeout=60",  # says where each rank is, also one that is stuck inside MPI
        "--color=no",
        "--junitxml",
        str(report),
        str(Path(__file__).parent / folder),
        "-r",
        "fE",
        *more,
    ]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed) if rank else contextlib.nullcontext():
        code = int(pytest.main(arguments))
    if rank and code:
        print(f"--- rank {rank} ---\n{printed.getvalue()}", flush=True)
    if code:
        take(_SAID_S)
        MPI.COMM_WORLD.Abort(code)
    return code


if __name__ == "__main__":
    sys.path.pop(0)  # the tests import the installed package, not what lies beside this file
    main()
