"""What saves and restores of a state on one CUDA GPU cost, compared with copies of the device itself.

    python benchmarks/gpu/run.py [--mib 2048] [--repetitions 9] [--on cpu] [--quick] [--json FILE] [--plot FILE]

This program starts one rank under mpiexec (ranks.py). The rank measures times (speed.py) and checks whether saved bits
can change (bits.py). Without CUDA this program prints one line and exits with status 0. With --on cpu it runs
everything that needs no CUDA, with a small state, to check that the benchmark works.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import torch  # noqa: E402
from bench.aims import D2H  # noqa: E402
from bench.question import Part, parser_of, run  # noqa: E402
from bench.results import keep, machine  # noqa: E402


def main() -> int:
    parser = parser_of(__doc__, timeout_s=280, repetitions=9)
    parser.add_argument("--mib", type=int, default=2048, help="MiB of parameters and moments together")
    parser.add_argument("--on", choices=["cuda", "cpu"], default="cuda", help="cpu is a dry run that measures nothing")
    args = parser.parse_args()
    if args.on == "cuda" and not torch.cuda.is_available():
        print("gpu: nothing was measured, because torch finds no CUDA device here")
        if args.json is not None:
            keep(args.json, {**machine(), "status": "needs CUDA"}, [])
        return 0
    if args.on == "cpu" and args.readme:
        parser.error("do not use --readme with --on cpu: a dry run measures nothing")
    if args.quick or args.on == "cpu":
        args.mib, args.repetitions = min(args.mib, 64), 3
    return run(args, [Part(1, HERE / "ranks.py", [args.on, args.mib << 20, args.repetitions])], yardstick=D2H)


if __name__ == "__main__":
    sys.exit(main())
