"""Shows which functions take the time of a save and of a restore: a profile of rank 0, by thread and function.

    python benchmarks/profile/run.py [--mib 256] [--tensors 32] [--quick] [--json FILE] [--plot FILE] [--readme]

It starts two ranks on this machine under mpiexec, each on an emulated node of its own (ranks.py). py-spy samples rank 0
from outside, a thousand times a second. Without py-spy (pip install py-spy) nothing is measured.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.question import Part, parser_of, run  # noqa: E402
from flame import draw  # noqa: E402
from stacks import Stacks  # noqa: E402

HERE = Path(__file__).parent


def main() -> int:
    parser = parser_of(__doc__, timeout_s=100, repetitions=60)
    parser.add_argument("--mib", type=int, default=256, help="MiB of tensors per rank")
    parser.add_argument("--tensors", type=int, default=32, help="number of tensors; 3000 shows the cost per tensor")
    args = parser.parse_args()
    if not Path(sys.executable).with_name("py-spy").exists():
        print("profile: py-spy is not installed: pip install py-spy", file=sys.stderr)
        return 0
    if args.quick:
        args.mib, args.repetitions = 32, 5
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "stacks.json")
        part = Part(2, HERE / "ranks.py", [args.mib << 20, args.tensors, args.repetitions, found])
        plot, args.plot = args.plot, None
        status = run(args, [part])
        plot = HERE / "plot.svg" if args.readme else plot
        if plot is not None and found.exists():
            draw(plot, {name: Stacks.from_lines(lines) for name, lines in json.loads(found.read_text()).items()})
    return status


if __name__ == "__main__":
    sys.exit(main())
