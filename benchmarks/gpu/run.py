"""What saves and restores of a state on one CUDA GPU cost, compared with copies of the device itself.

    python benchmarks/gpu/run.py [--mib 2048] [--repetitions 9] [--on cpu] [--quick] [--json FILE]

One rank runs under mpiexec. It measures times (speed.py) and checks whether saved bits can change (bits.py). Without
CUDA this program prints one line and exits with status 0. With --on cpu it runs everything that needs no CUDA, with a
small state, to check that the benchmark works.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import torch
from bench.clock import Bench
from bench.launch import Part
from bench.question import Question, not_measured, parser_of
from bits import compare
from speed import measure

from mlflash.tools.bench_training import Device


def costs(bench: Bench, name: str, nbytes: int) -> None:
    """Measure times, then compare bits, on one device."""
    device = Device(name)
    bench.header(**device.says())
    measure(bench, device, nbytes)
    compare(bench, device, min(nbytes, 256 << 20))


def main() -> int:
    parser = parser_of(__doc__, repetitions=9, timeout_s=280)
    parser.add_argument("--mib", type=int, default=2048, help="MiB of parameters and moments together")
    parser.add_argument("--on", choices=["cuda", "cpu"], default="cuda", help="cpu is a dry run that measures nothing")
    args = parser.parse_args()
    if args.on == "cuda" and not torch.cuda.is_available():
        return not_measured(args, "torch finds no CUDA device here")
    if args.quick or args.on == "cpu":
        args.mib, args.repetitions = min(args.mib, 64), 3
    return Question(args).run([Part(1, costs, {"name": args.on, "nbytes": args.mib << 20})])


if __name__ == "__main__":
    sys.exit(main())
