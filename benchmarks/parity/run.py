"""Measures how fast parity is made and lost slots are rebuilt, compared with a memcpy, an XOR loop and an exchange.

    python benchmarks/parity/run.py [--ranks 4] [--mib 64] [--repetitions 9] [--transport p2p] [--quick] ...

It starts the ranks (ranks.py) under mpiexec, each on an emulated node of its own. The time of a scheme includes
checksums of every block at both ends. The raw exchange and the XOR loop make no checksums.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.question import Part, parser_of, run  # noqa: E402


def main() -> int:
    parser = parser_of(__doc__, timeout_s=180, repetitions=9)
    parser.add_argument("--ranks", type=int, default=4, help="number of ranks, 4 or more")
    parser.add_argument("--mib", type=int, default=64, help="MiB per rank")
    parser.add_argument("--transport", choices=("p2p", "rma"), default="p2p", help="the transport= of mlflash")
    args = parser.parse_args()
    if args.ranks < 4:
        parser.error("--ranks must be 4 or more")
    if args.quick:
        args.mib, args.repetitions = 8, 3
    arguments = [args.mib << 20, args.repetitions, args.transport]
    part = Part(args.ranks, Path(__file__).with_name("ranks.py"), arguments)
    return run(args, [part], yardstick="raw exchange")


if __name__ == "__main__":
    sys.exit(main())
