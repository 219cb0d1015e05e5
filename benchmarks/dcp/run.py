"""What PyTorch DCP costs through mlflash and through files in /dev/shm, in multiples of a memcpy.

    python benchmarks/dcp/run.py [--ranks 2] [--mib 4] [--small 1000] [--repetitions 3] [--quick] [--json FILE] ...

This program starts its ranks (ranks.py) under mpiexec, each on an emulated node of its own. After each load it compares
the loaded state bit by bit with the saved one.

    stall   time until dcp.async_save returns and training continues
    total   time until its future has a result: the checkpoint has committed, or the files are written
    CPU     seconds of all threads of a rank from the call of dcp.async_save to that result
    sync    time of dcp.save
    load    time of dcp.load
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.question import Part, parser_of, run  # noqa: E402
from bench.rows import Row  # noqa: E402


def main() -> int:
    parser = parser_of(__doc__, timeout_s=240, repetitions=3)
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks, 2 or more")
    parser.add_argument("--large", type=int, default=64, help="number of large tensors")
    parser.add_argument("--mib", type=int, default=4, help="MiB of each large tensor on each rank")
    parser.add_argument("--small", type=int, default=1000, help="number of small tensors")
    args = parser.parse_args()
    if args.ranks < 2:
        parser.error("--ranks must be 2 or more")
    if args.quick:
        args.large, args.mib, args.small, args.repetitions = 16, 1, 100, 1
    arguments = [args.large, args.mib << 20, args.small, args.repetitions]
    return run(args, [Part(args.ranks, Path(__file__).with_name("ranks.py"), arguments)], drawn=is_drawn)


def is_drawn(row: Row) -> bool:
    return row["what"] != "memcpy" and row.get("column") in ("stall", "load")


if __name__ == "__main__":
    sys.exit(main())
