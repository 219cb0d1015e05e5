"""Measures how long a save stops training, when it is committed, and how many CPU seconds it takes.

    python benchmarks/save/run.py [--mib 256] [--repetitions 5] [--quick] [--json FILE] [--plot FILE] [--readme]

It starts two ranks on this machine under mpiexec, each on an emulated node of its own (ranks.py). Then it measures the
lazy copy (lazy.py) on one rank, which leaves a core for copies during training, and on two ranks.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.question import Part, in_eights, parser_of, run  # noqa: E402

HERE = Path(__file__).parent


def main() -> int:
    parser = parser_of(__doc__, timeout_s=240, repetitions=5)
    parser.add_argument("--mib", type=in_eights, default=256, help="MiB of tensors per rank, a multiple of 8")
    args = parser.parse_args()
    if args.quick:
        args.mib, args.repetitions = 32, 3
    sizes = [args.mib << 20, args.repetitions]
    return run(args, [
        Part(2, HERE / "ranks.py", sizes), Part(1, HERE / "lazy.py", sizes), Part(2, HERE / "lazy.py", sizes)
    ], drawn=lambda row: "the part" not in row["what"])  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
