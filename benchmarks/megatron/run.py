"""What Megatron's local checkpoints cost: compares LocalCheckpoints with NVRx's manager, both with copies.

    python benchmarks/megatron/run.py [--ranks 2] [--mib 256] [--repetitions 5] [--quick] [--json FILE] ...

This program starts its ranks (ranks.py) under mpiexec, each on an emulated node of its own. NVRx's manager writes to
/dev/shm and replicates to the other rank (clique of 2). Its wheel is for one version of Python only, but its
checkpointing is not. So you can unpack what `pip download --no-deps nvidia-resiliency-ext` gives, and add it to
PYTHONPATH. Without NVRx its rows are left out. After each load the ranks compare the loaded state bit by bit with the
saved one.

    stall       time until save and the queue that takes its request return, and training continues
    total       time until the request is finalized
    load        time of find_latest and load
    after loss  the same after rank 0's node was lost
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.question import Part, parser_of, run  # noqa: E402


def main() -> int:
    parser = parser_of(__doc__, timeout_s=240, repetitions=5)
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks, an even number")
    parser.add_argument("--mib", type=int, default=256, help="MiB of tensors on each rank")
    parser.add_argument(
        "--tensors",
        type=int,
        nargs="+",
        default=[64, 1024],
        help="split the MiB into this many tensors; one table for each number",
    )
    args = parser.parse_args()
    if args.ranks < 2 or args.ranks % 2:
        parser.error("--ranks must be an even number")
    if args.quick:
        args.mib, args.tensors, args.repetitions = 8, [16], 1
    arguments = [args.mib << 20, args.repetitions, *args.tensors]
    return run(args, [Part(args.ranks, Path(__file__).with_name("ranks.py"), arguments)],
               drawn=lambda row: row["what"] != "memcpy")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
