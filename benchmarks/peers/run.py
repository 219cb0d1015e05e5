"""Compares other checkpoint libraries with mlflash: how long training waits, when a checkpoint is whole, what it costs.

    python benchmarks/peers/run.py [--peers NAME ...] [--shapes NAME ...] [--mib 256] [--repetitions 5] [--quick] ...

It starts two ranks, each on an emulated node, for each library and each state. A launch times the library, memcpy and
mlflash in the same rounds. All libraries write to /dev/shm. Libraries that are not installed are left out, and the
result names the command that installs them.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.aims import MEMCPY  # noqa: E402
from bench.launch import launch  # noqa: E402
from bench.plots import draw  # noqa: E402
from bench.question import begin, finish, in_eights, parser_of  # noqa: E402
from bench.results import read  # noqa: E402
from bench.rows import Row  # noqa: E402
from listed import BY_NAME, OURS, PEERS  # noqa: E402
from rows import rows_of, together  # noqa: E402

RANKS_PY = Path(__file__).with_name("ranks.py")
SHAPES = {"8 MiB tensors": (8 << 20, None), "1024 tensors": (None, 1024), "3000 x 4 KiB": (4096, 3000)}
OWN = "MLFLASH_BENCH_OWN_SHM"


def main() -> int:
    args = arguments()
    if args.list:
        return list_peers()
    begun = begin(args)
    if args.again:
        runs = [read(path) for path in args.again]
        rows = together([run.rows for run in runs])
        said = {
            name: "; ".join(dict.fromkeys(str(run.header.get(name, "")) for run in runs)) for name in runs[0].header
        }
        return finish(args, begun, said, rows, (), lambda path: plot(path, rows))
    own_shm()
    lines, said, wrong = measure(args)
    said["versions"] = "; ".join(dict.fromkeys(f"{one.distribution} {one.version()}" for one in PEERS if one.version()))
    missing = [Row(what=one.name, case="Not measured", note=f"not installed: {one.install}")
               for one in PEERS if one.name in args.peers and not one.version()]  # fmt: skip
    rows = [*rows_of(lines), *missing]
    return finish(args, begun, said, rows, wrong, lambda path: plot(path, rows))


def measure(args: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any], list[str]]:
    """Start all launches. Return their lines, the entries for the header, and what went wrong."""
    lines: list[dict[str, Any]] = []
    said: dict[str, Any] = {}
    wrong: list[str] = []
    for peer in [BY_NAME[name] for name in args.peers]:
        for shape in args.shapes if peer.version() else ():
            each, count = SHAPES[shape]
            count = count or (args.mib << 20) // each
            nbytes = each * count if each else args.mib << 20
            print(f"{peer.name}: {shape}", file=sys.stderr)
            numbers = [os.getpid(), count, nbytes, args.repetitions]
            ended, found = launch(2, RANKS_PY, [peer.name, *map(str, numbers)], args.timeout_s)
            wrong += [f"{peer.name}, {shape}: {ended}"] * bool(ended)
            said |= found[0] if found else {}
            lines += [{"launch": peer.name, "shape": shape, **line} for line in found[1:]]
    return lines, said, wrong


def plot(path: Path, rows: Sequence[Row]) -> None:
    draw(path, [row for row in rows if row.get("column") in ("stall", "whole")], MEMCPY)


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, timeout_s=240, repetitions=5)
    names = [peer.name for peer in PEERS]
    parser.add_argument("--peers", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES), help="shapes of the state")
    parser.add_argument("--mib", type=in_eights, default=256, help="MiB per rank, a multiple of 8")
    parser.add_argument(
        "--again", type=Path, nargs="+", metavar="FILE", help="show files that --json wrote, and measure nothing"
    )
    parser.add_argument("--list", action="store_true", help="list what is installed, and how to install the rest")
    args = parser.parse_args()
    if args.quick:
        args.mib, args.repetitions, args.shapes = 16, 2, ["8 MiB tensors"]
        if args.peers == names:
            args.peers = [peer.name for peer in PEERS if peer.package == "torch"]
    return args


def list_peers() -> int:
    for peer in OURS + PEERS:
        print(f"{peer.name}: {peer.version() or 'not installed'}; {peer.install}")
    return 0


def own_shm() -> None:
    """As root, start this program again with its own /dev/shm. It holds only our files and is removed with us."""
    if OWN in os.environ or os.geteuid() != 0:
        return
    os.environ[OWN] = "1"
    size = os.statvfs("/dev/shm")
    mount = f'mount -t tmpfs -o size={size.f_blocks * size.f_frsize} tmpfs /dev/shm && exec "$@"'
    prefix = ["unshare", "--mount", "--propagation", "private", "sh", "-c"]
    if os.spawnvp(os.P_WAIT, "unshare", [*prefix, mount, "sh", "true"]) == 0:
        sys.stdout.flush()
        os.execvp("unshare", [*prefix, mount, "sh", sys.executable, *sys.argv])
    del os.environ[OWN]


if __name__ == "__main__":
    sys.exit(main())
