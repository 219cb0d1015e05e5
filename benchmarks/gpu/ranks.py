"""The program of the one rank: it measures times, then compares bits, on one device."""

from __future__ import annotations

import sys
from pathlib import Path

from bench.clock import Bench
from bits import compare
from device import Device
from mpi4py import MPI
from speed import measure


def main() -> None:
    out, memory, name = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    nbytes, repetitions = int(sys.argv[4]), int(sys.argv[5])
    bench, device = Bench(MPI.COMM_WORLD, out, memory, repetitions), Device(name)
    bench.header(**device.says())
    measure(bench, device, nbytes)
    compare(bench, device, min(nbytes, 256 << 20))


if __name__ == "__main__":
    main()
