"""Compares other checkpoint libraries with mlflash: how long training waits, when a checkpoint is whole, what it costs.

    python benchmarks/peers/run.py [--peers NAME ...] [--shapes NAME ...] [--mib 128] [--repetitions 3] [--quick] ...
    python benchmarks/peers/run.py --list    # what each library writes and guarantees, and how to install it

It starts two ranks, each on an emulated node, for each library and each state. A launch times the library, memcpy and
mlflash in the same rounds. All libraries write to /dev/shm. Libraries that are not installed are left out.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from bench.launch import Part, launch
from bench.question import Question, parser_of
from listed import BY_NAME, OURS, PEERS
from rows import rows_of

if TYPE_CHECKING:
    from bench.clock import Bench

SHAPES = {"8 MiB tensors": (8 << 20, None), "1024 tensors": (None, 1024), "3000 x 4 KiB": (4096, 3000)}
OWN = "MLFLASH_BENCH_OWN_SHM"


def ranks(bench: Bench, **arguments: object) -> None:
    from rounds import compare

    compare(bench, **arguments)  # type: ignore[arg-type]


def main() -> int:
    args = arguments()
    if args.list:
        for peer in OURS + PEERS:
            print(f"{peer.name}: {peer.version() or 'not installed'}; {peer.install}")
            print(f"    writes {peer.writes}; whole when {peer.whole}")
        return 0
    own_shm()
    question = Question(args)
    lines = []
    for peer in [BY_NAME[name] for name in args.peers]:
        for shape in args.shapes if peer.version() else ():
            nbytes_each, count = SHAPES[shape]
            count = count or (args.mib << 20) // nbytes_each
            nbytes = nbytes_each * count if nbytes_each else args.mib << 20
            print(f"{peer.name}: {shape}", file=sys.stderr)
            state = {"name": peer.name, "root": os.getpid(), "count": count, "nbytes": nbytes}
            why, written = launch(Part(2, ranks, state), args.repetitions, args.timeout_s)
            question.wrong += [f"{peer.name}, {shape}: {why}"] * bool(why)
            question.add(written[:1])
            lines += [{"launch": peer.name, "shape": shape, **line} for line in written[1:]]
    question.add(rows_of(lines))
    versions = {peer.name: peer.version() for peer in PEERS if peer.name in args.peers}
    question.add([{"versions": "; ".join(f"{name} {version}" for name, version in versions.items() if version),
                   "not installed": "; ".join(name for name, version in versions.items() if not version)}])  # fmt: skip
    return question.finish()


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, repetitions=3)
    names = [peer.name for peer in PEERS]
    parser.add_argument("--peers", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument(
        "--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES)[:1], help="shapes of the state"
    )
    parser.add_argument("--mib", type=int, default=128, help="MiB per rank, a multiple of 8")
    parser.add_argument("--list", action="store_true", help="list the libraries, and measure nothing")
    args = parser.parse_args()
    if args.quick:
        args.mib, args.repetitions, args.shapes = 16, 2, [*SHAPES][:1]
    with_torch = [peer.name for peer in PEERS if peer.package == "torch"]
    args.peers = args.peers or (with_torch if args.quick else names)
    return args


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
