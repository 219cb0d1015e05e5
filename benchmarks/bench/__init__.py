"""The code that all benchmarks share. It starts and times ranks, and makes tables and files of the results."""

import sys
from pathlib import Path

import mpi4py

mpi4py.rc.initialize = Path(sys.argv[0]).name == "rank.py"  # the program that starts the ranks is none of them
