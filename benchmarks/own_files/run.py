"""Measures how long frameworks' own checkpoints stop training: as usual, with in_background=, and by other libraries.

    python benchmarks/own_files/run.py [--disk DIR] [--ranks 2] [--mib 200] [--repetitions 7] [--quick] ...

Each framework that can be imported here, or in the environment of its tests (such as .venv-lightning), trains a model
for a step and then saves again and again (*_ranks.py). --quick runs only the first framework that can be imported here,
because other environments may be incomplete. If no framework can be imported, the program says so and exits with 0.

    stall    time until the save returns and training continues
    on disk  time until all files have their final names and the disk has them
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.question import Part, parser_of, run  # noqa: E402
from bench.results import keep, machine  # noqa: E402

HERE = Path(__file__).parent
FRAMEWORKS = {  # the module to import, and the environment of its tests
    "transformers": ("transformers", ".venv-transformers"),
    "lightning": ("lightning", ".venv-lightning"),
    "deepspeed": ("deepspeed", ".venv-transformers"),
    "megatron": ("megatron.core", ".venv-megatron"),
}


def python_with(module: str, environment: str) -> str:
    """Return the Python that has a framework, or "" if no Python has it."""
    there = HERE.parents[1] / environment / "bin" / "python"
    with contextlib.suppress(ModuleNotFoundError):  # the parent package is missing
        if importlib.util.find_spec(module):
            return sys.executable
    return str(there) if there.exists() else ""


def main() -> int:
    parser = parser_of(__doc__, timeout_s=280, repetitions=7)
    parser.add_argument("--disk", type=Path, default=Path("/var/tmp"), help="a directory on the disk")
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks of each training")
    parser.add_argument("--mib", type=int, default=200, help="approximate MiB of a checkpoint")
    parser.add_argument(
        "--only", nargs="+", choices=FRAMEWORKS, default=list(FRAMEWORKS), help="measure only these frameworks"
    )
    args = parser.parse_args()
    found = {name: python_with(*FRAMEWORKS[name]) for name in args.only}
    if args.quick:
        args.mib, args.repetitions = 8, 1
        found = dict([(name, python) for name, python in found.items() if python == sys.executable][:1])
    if not any(found.values()):
        status = f"needs one of {', '.join(args.only)}"
        print(f"own_files: {status}. None can be imported here or in the environments of the tests")
        if args.json is not None:
            keep(args.json, {**machine(), "status": status}, [])
        return 0
    with tempfile.TemporaryDirectory(dir=args.disk, prefix="mlflash-bench-") as disk:
        arguments = [disk, args.mib, args.repetitions]
        parts = [Part(args.ranks, HERE / f"{name}_ranks.py", arguments, 1, python)
                 for name, python in found.items() if python]  # fmt: skip
        return run(args, parts)


if __name__ == "__main__":
    sys.exit(main())
