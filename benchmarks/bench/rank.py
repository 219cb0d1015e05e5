"""The program of each rank: it calls one function of a question.

Some libraries start processes that import this file again. Such a process must not import MPI, which cannot start in
it.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path


def main() -> None:
    from mpi4py import MPI

    from bench.clock import Bench

    out, memory, file, function, repetitions, arguments = sys.argv[1:]
    sys.path.insert(0, str(Path(file).parent))
    bench = Bench(MPI.COMM_WORLD, Path(out), Path(memory), int(repetitions))
    bench.header()
    getattr(importlib.import_module(Path(file).stem), function)(bench, **json.loads(arguments))


if __name__ == "__main__":
    main()
