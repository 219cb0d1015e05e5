"""What saves cost in wall time: how long steps with a save every N steps take, compared with no saves.

    python benchmarks/walltime/run.py [--mib 12 100] [--every 10 2 1] [--steps 20] [--repetitions 5] [--quick] ...

One rank (ranks.py) trains the demo's GPT on one core of this machine. It saves with mlflash, eagerly and with until=,
with `dcp.async_save` and with `torch.save`, all to /dev/shm. Another core is idle except for the work of saves.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.aims import OFF  # noqa: E402
from bench.question import Part, parser_of, run  # noqa: E402

HERE = Path(__file__).parent


def main() -> int:
    parser = parser_of(__doc__, timeout_s=280, repetitions=5)
    parser.add_argument("--mib", type=int, nargs="+", default=[12, 100], help="MiB of state, one model for each number")
    parser.add_argument(
        "--every", type=int, nargs="+", default=[10, 2, 1], help="save every so many steps, one case for each number"
    )
    parser.add_argument(
        "--steps", type=int, default=20, help="number of steps in one timing, a multiple of each --every"
    )
    args = parser.parse_args()
    if args.quick:
        args.mib, args.every, args.steps, args.repetitions = [2], [2], 4, 2
    if any(args.steps % every for every in args.every):
        parser.error("--steps must be a multiple of each --every")
    sizes = [args.repetitions, args.steps, ",".join(map(str, args.every))]
    return run(args, [Part(1, HERE / "ranks.py", [mib, *sizes]) for mib in args.mib], yardstick=OFF)


if __name__ == "__main__":
    sys.exit(main())
