"""How long a relaunched job takes to restore its state, on the same nodes and after a node was wiped, part by part.

    python benchmarks/restore/run.py [--mib 256] [--repetitions 6] [--quick] [--json FILE] [--plot FILE] [--readme]

This program starts two ranks (ranks.py) under mpiexec on this machine, each on an emulated node of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.question import Part, in_eights, parser_of, run  # noqa: E402


def main() -> int:
    parser = parser_of(__doc__, timeout_s=180, repetitions=6)
    parser.add_argument("--mib", type=in_eights, default=256, help="MiB of tensors per rank, a multiple of 8")
    args = parser.parse_args()
    if args.quick:
        args.mib, args.repetitions = 32, 3
    return run(args, [Part(2, Path(__file__).with_name("ranks.py"), [args.mib << 20, args.repetitions])])


if __name__ == "__main__":
    sys.exit(main())
