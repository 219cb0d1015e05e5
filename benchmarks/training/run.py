"""Measures how much the courier slows a training step.

    python benchmarks/training/run.py [--mib 64] [--repetitions 5] [--quick] [--json FILE] [--plot FILE] [--readme]
    python benchmarks/training/run.py --couriers [--mib 64] [--repetitions 20] [--quick] [--json FILE]

It starts two ranks on this machine under mpiexec, each on an emulated node of its own (ranks.py, interpreter.py). With
--couriers it compares couriers that are threads with couriers that are processes (couriers.py, which needs a C
compiler).
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from bench.aims import ALONE  # noqa: E402
from bench.question import Part, in_eights, parser_of, run  # noqa: E402
from cores import ONE_CORE, OWN_CORE, enough  # noqa: E402

WINDOW_S, QUICK_WINDOW_S = 0.3, 0.1  # seconds of steps without a save, before and after each save


def main() -> int:
    parser = parser_of(__doc__, timeout_s=240, repetitions=5)
    parser.add_argument(
        "--couriers", action="store_true", help="compare couriers that are threads and processes instead"
    )
    parser.add_argument("--mib", type=in_eights, default=64, help="MiB of tensors per rank, a multiple of 8")
    args = parser.parse_args()
    if not enough():
        sys.exit("this needs two cores: one for training and one for the courier, and one for each of two ranks")
    window_s = WINDOW_S
    if args.quick:
        args.mib, args.repetitions, window_s = 16, 1, QUICK_WINDOW_S
    sizes = [args.mib << 20, args.repetitions]
    if args.couriers:
        return run(args, [Part(2, HERE / "couriers.py", [*sizes, window_s])], yardstick=ALONE)
    return run(args, [
        *(Part(2, HERE / "ranks.py", [kind, *sizes, window_s]) for kind in (ONE_CORE, OWN_CORE)),
        *(Part(2, HERE / "interpreter.py", [kind, *sizes]) for kind in (ONE_CORE, OWN_CORE)),
    ], yardstick=ALONE)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
