"""What saves cost in wall time: steps of a training with a save every N steps, over the same steps without saves.

    python benchmarks/walltime/run.py [--mib 12 100] [--every 10 2 1] [--steps 20] [--repetitions 5] [--quick] ...

One rank trains the demo's GPT on one core of this machine and saves by mlflash, eagerly and with until=, by
`dcp.async_save` and by `torch.save`, all into /dev/shm (ranks.py). Another core is idle except for the work of saves.
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
    parser.add_argument("--mib", type=int, nargs="+", default=[12, 100], help="MiB of state of each model")
    parser.add_argument("--every", type=int, nargs="+", default=[10, 2, 1], help="steps from save to save")
    parser.add_argument(
        "--steps", type=int, default=20, help="steps that are timed together, a multiple of each --every"
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
