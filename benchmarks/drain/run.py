"""Measures how fast checkpoints get from memory to a disk, and how this slows training.

    python benchmarks/drain/run.py [--disk DIR] [--ranks 2] [--mib 128] [--repetitions 3] [--quick] [--json FILE] ...

It starts the ranks (ranks.py) under mpiexec, each on an emulated node of its own. steps.py measures how much training
is slowed. A drain, dd and PyTorch's writer write the same number of bytes to the same disk, and wait until the disk has
them. dd writes zeros, which some disks take faster.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.question import Part, parser_of, run  # noqa: E402

TENSORS = 64


def main() -> int:
    parser = parser_of(__doc__, timeout_s=240, repetitions=3)
    parser.add_argument("--disk", type=Path, default=Path("/var/tmp"), help="a directory on the disk")
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks")
    parser.add_argument("--mib", type=int, default=128, help="MiB per rank, in 64 tensors")
    parser.add_argument("--step-ms", type=float, default=50, help="milliseconds of a training step")
    args = parser.parse_args()
    if args.quick:
        args.mib, args.repetitions = 16, 1
    with tempfile.TemporaryDirectory(dir=args.disk, prefix="mlflash-bench-") as disk:
        arguments = [disk, TENSORS, args.mib * (1 << 20) // TENSORS, args.repetitions, args.step_ms / 1e3]
        part = Part(args.ranks, Path(__file__).with_name("ranks.py"), arguments)
        return run(args, [part], yardstick="dd, synced")


if __name__ == "__main__":
    sys.exit(main())
