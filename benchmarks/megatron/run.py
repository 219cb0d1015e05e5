"""What local checkpoints of Megatron cost training: LocalCheckpoints compared with NVRx's manager, both with copies.

    python benchmarks/megatron/run.py [--ranks 2] [--mib 256] [--repetitions 5] [--quick] [--json FILE] ...

It starts itself under mpiexec, each rank on an emulated node of its own; ranks.py is what the ranks do. NVRx's manager
writes to /dev/shm and replicates to the other rank (clique of 2). Its wheel is for one version of Python only, but its
checkpointing is not. So it is enough to unpack what `pip download --no-deps nvidia-resiliency-ext` gives, and to add it
to PYTHONPATH. Without NVRx its part is left out. What is loaded is compared bit by bit with what was saved.

    stall       until save, and the queue that its request goes to, return and training goes on
    total       until the request is finalized
    load        find_latest and load
    after loss  the same, after rank 0's node was lost
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.question import Part, parser_of, run  # noqa: E402


def main() -> int:
    parser = parser_of(__doc__, timeout_s=240, repetitions=5)
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks, even")
    parser.add_argument("--mib", type=int, default=256, help="MiB of each rank")
    parser.add_argument(
        "--tensors", type=int, nargs="+", default=[64, 1024], help="numbers of tensors of this size in total"
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
