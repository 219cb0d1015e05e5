"""Measures difficult cases: small tensors, a huge one, growth, a save at every step, 8 ranks, the first save.

    python benchmarks/sizes/run.py [--mib 128] [--repetitions 4] [--quick] [--json FILE] [--plot FILE] [--readme]

It starts two ranks on this machine under mpiexec, each on an emulated node of its own (ranks.py, busy.py). Then it
starts eight ranks, once as one node and once as two nodes of four (ranks_of_a_node.py).
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.question import Part, parser_of, run  # noqa: E402
from bench.rows import Row  # noqa: E402

HERE = Path(__file__).parent


def main() -> int:
    parser = parser_of(__doc__, timeout_s=240, repetitions=4)
    parser.add_argument(
        "--mib", type=int, default=128, help="MiB of tensors per rank, a multiple of 8; each of 8 ranks has an eighth"
    )
    args = parser.parse_args()
    if args.mib < 64 or args.mib % 8:
        parser.error("--mib must be a multiple of 8, at least 64")
    if args.quick:
        args.mib, args.repetitions = 64, 1
    nbytes, often = args.mib << 20, args.repetitions
    return run(args, [
        Part(2, HERE / "ranks.py", [nbytes, often]),
        Part(2, HERE / "busy.py", [nbytes, often]),
        Part(8, HERE / "ranks_of_a_node.py", [nbytes // 8, often], per_node=8),
        Part(8, HERE / "ranks_of_a_node.py", [nbytes // 8, often], per_node=4),
    ], drawn=is_stall)  # fmt: skip


def is_stall(row: Row) -> bool:
    return "stall" in row["what"] or row["what"].startswith("steps")


if __name__ == "__main__":
    sys.exit(main())
