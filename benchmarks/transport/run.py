"""Times the ways of MPI to send a slot to another node: on one host, between nodes, with a busy main thread.

    python benchmarks/transport/run.py [--mib 64] [--chunk-mib 4 ...] [--repetitions 7] [--main idle ...]
                                       [--place "one host" ...] [--fabrics] [--way "Isend + Irecv" ...] [--quick]
                                       [--json FILE] ...

Both ranks send to each other at once, with checksums at both ends. The two nodes are made of namespaces (as root, on
Linux). The program uses the MPI of its Python environment. To compare MPIs, run it in an environment of each.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from bench.aims import AIMS  # noqa: E402
from bench.question import begin, finish, parser_of  # noqa: E402
from bench.rows import Row  # noqa: E402
from computing import IDLE, MAINS, PYTHON  # noqa: E402
from places import Launch, fabrics, places  # noqa: E402

WAYS = ("Put + flush", "Rput", "Rput, pushed", "Put + unlock", "PSCW", "fence", "Isend + Irecv",
        "mlflash, p2p", "mlflash, rma")  # fmt: skip
QUICK_WAYS = ("Rput, pushed", "Isend + Irecv")
FABRIC_WAYS = ("Rput, pushed", "Isend + Irecv", "mlflash, p2p", "mlflash, rma")  # the choices of transport="auto"
START_S = 60.0  # limit of a launch with its imports
APART = "committed between hosts"


def main() -> int:
    args = arguments()
    begun = begin(args)
    rows: list[Row] = []
    said: dict[str, Any] = {}
    wrong: list[str] = []
    for place, open_place in (places() | fabrics()).items():
        if place not in args.place:
            continue
        with open_place() as launch:
            for chunk_mib in args.chunk_mib:
                for main_does in args.main:
                    found, ended = sweep(launch, args, main_does, chunk_mib, said)
                    case = f"{place}, chunks of {chunk_mib} MiB; by what the main thread does"
                    for row in found:
                        row["case"], row["column"] = case, main_does
                        if row["what"].startswith("mlflash") and place.startswith("two nodes") and main_does == IDLE:
                            row["shows"], row["aim"] = APART, (AIMS[APART].over, AIMS[APART].most)
                    rows += found
                    wrong += [f"{place}, main {main_does}: {one}" for one in ended]

    def plot(path: Path) -> None:
        from plot import draw

        draw(said.get("mpi", ""), rows, path)

    return finish(args, begun, said, rows, wrong, plot)


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, timeout_s=None, repetitions=7)
    there, stand_ins = list(places()), list(fabrics())
    parser.add_argument("--mib", type=int, default=64, help="MiB per rank and direction")
    parser.add_argument("--chunk-mib", type=int, nargs="+", default=[4], help="MiB per transfer")
    parser.add_argument(
        "--deadline-s", type=float, default=12.0, help="limit of one exchange in seconds; a longer one counts as never"
    )
    parser.add_argument("--main", nargs="+", choices=MAINS, default=MAINS, help="the work of the main thread")
    parser.add_argument("--place", nargs="+", choices=there + stand_ins, default=there, help="places of the two ranks")
    parser.add_argument("--fabrics", action="store_true", help="measure all software fabrics that replace hardware")
    parser.add_argument("--way", nargs="+", choices=WAYS, default=WAYS, help="ways to send")
    args = parser.parse_args()
    if args.fabrics:
        args.place, args.way = stand_ins if args.place is there else args.place, FABRIC_WAYS
    if args.quick:
        args.mib, args.repetitions, args.main, args.place = 8, 2, [IDLE, PYTHON], there[:1]
        args.way = QUICK_WAYS
    return args


def sweep(
    launch: Launch, args: argparse.Namespace, main_does: str, chunk_mib: int, said: dict[str, Any]
) -> tuple[list[Row], list[str]]:
    """Time all ways with one kind of main thread. After a way that does not end, a new launch times the rest.

    Returns:
        Rows, and what went wrong.
    """
    left = list(args.way)
    rows: list[Row] = []
    wrong: list[str] = []
    while left:
        arguments = [args.mib << 20, chunk_mib << 20, args.repetitions, main_does, args.deadline_s, "|".join(left)]
        timeout_s = START_S + len(left) * (args.repetitions + 2) * args.deadline_s / 2
        ended, lines = launch(HERE / "ranks.py", list(map(str, arguments)), timeout_s)
        said |= lines[0] if lines else {}
        found: list[Row] = lines[1:]  # type: ignore[assignment]
        rows += found
        left = left[len(found) :]
        if found and "over" not in found[-1]:  # this way never ended: time the ways after it
            continue
        if left:
            wrong.append(f"{left[0]}: {ended or 'wrote nothing'}")
            rows.append(Row(what=left.pop(0), note="failed"))
    return rows, wrong


if __name__ == "__main__":
    sys.exit(main())
