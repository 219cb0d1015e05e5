"""Measures how long frameworks' own checkpoints stop training: as usual, with in_background=, and by other libraries.

    python benchmarks/own_files/run.py [--disk DIR] [--ranks 2] [--mib 200] [--repetitions 7] [--quick] ...

Each framework that can be imported here, or in the environment of its tests (such as .venv-lightning), trains a model
for a step and then saves again and again (*_ranks.py). Then it saves in memory after each step. --quick runs only the
first framework that can be imported here, because other environments may be incomplete. If no framework can be
imported, the program says so and exits with 0.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.launch import Part
from bench.question import Question, not_measured, parser_of

if TYPE_CHECKING:
    from bench.clock import Bench

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


def train(bench: Bench, framework: str, disk: str, mib: int) -> None:
    """Let a framework train and save."""
    from rounds import Rounds

    importlib.import_module(f"{framework}_ranks").train(Rounds(bench, Path(disk), mib))


def main() -> int:
    parser = parser_of(__doc__, repetitions=7, timeout_s=280)
    parser.add_argument("--disk", type=Path, default=Path("/var/tmp"), help="a directory on the disk")
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks of each training")
    parser.add_argument("--mib", type=int, default=200, help="approximate MiB of a checkpoint")
    parser.add_argument("--only", nargs="+", choices=FRAMEWORKS, default=list(FRAMEWORKS), help="only these frameworks")
    args = parser.parse_args()
    pythons = {name: python for name in args.only if (python := python_with(*FRAMEWORKS[name]))}
    if args.quick:
        args.mib, args.repetitions = 8, 1
        pythons = dict([(name, python) for name, python in pythons.items() if python == sys.executable][:1])
    if not pythons:
        return not_measured(args, f"none of {', '.join(args.only)} can be imported here")
    with tempfile.TemporaryDirectory(dir=args.disk, prefix="mlflash-bench-") as disk:
        return Question(args).run([
            Part(args.ranks, train, {"framework": name, "disk": disk, "mib": args.mib}, python=python)
            for name, python in pythons.items()
        ])  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
