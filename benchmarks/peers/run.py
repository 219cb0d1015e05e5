"""Other checkpoint libraries beside mlflash: how long training waits, until when it is whole, and what it takes.

    python benchmarks/peers/run.py [--peers NAME ...] [--shapes NAME ...] [--mib 256] [--rounds 5] [--quick] [--list]

Each library and each state is a launch of its own on two ranks, emulated nodes, with memcpy and mlflash in the same
rounds; all of them write into /dev/shm. Those that are not installed are named, with what pip wants, and left out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

from listed import BY_NAME, OURS, PEERS
from rows import rows_of
from show import markdown, show

from mlflash import __version__

RANKS_PY = Path(__file__).with_name("ranks.py")
SHAPES = {"8 MiB tensors": (8 << 20, None), "1024 tensors": (None, 1024), "3000 x 4 KiB": (4096, 3000)}
OWN = "MLFLASH_BENCH_OWN_SHM"


def main() -> int:
    args = arguments()
    if args.list:
        return list_peers()
    if args.again:
        return finish(args, *joined(args.again))
    own_shm()
    sys.path[:0] = [str(Path(__file__).parents[1])]
    from launch import launch

    before = os.getloadavg()[0]
    lines: list[dict[str, Any]] = []
    mpi, failed, missing = "unknown", [], []
    for peer in [BY_NAME[name] for name in args.peers]:
        if not peer.version():
            missing.append(f"{peer.name} is not installed: {peer.install}")
            continue
        for shape in args.shapes:
            each, count = SHAPES[shape]
            count = count or (args.mib << 20) // each
            nbytes = each * count if each else args.mib << 20
            print(f"{peer.name}: {shape}", file=sys.stderr)
            numbers = [os.getpid(), count, nbytes, args.rounds]
            ended, said = launch(2, RANKS_PY, [peer.name, *map(str, numbers)], args.timeout_s)
            mpi = said[0]["mpi"] if said else mpi
            if ended:
                failed.append(f"{peer.name}, {shape}: {ended}")
            lines += [{"peer": peer.name, "shape": shape, **line} for line in said[1:]]
    header = {
        "mpi": mpi, "cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version(),
        "load average before": before, "load average after": os.getloadavg()[0], "mlflash": __version__,
        "versions": {one.distribution: one.version() for one in PEERS if one.version()},
        "MiB per rank": args.mib, "rounds": args.rounds, "own /dev/shm": OWN in os.environ,
        "not installed": missing, "failed": failed,
    }  # fmt: skip
    return finish(args, header, rows_of(lines))


def finish(args: argparse.Namespace, header: dict[str, Any], rows: list[dict[str, Any]]) -> int:
    """Show and write everything; gives the exit status."""
    show(header, rows)
    if args.json:
        args.json.write_text(json.dumps({"header": header, "rows": rows}, indent=1) + "\n")
    if args.markdown:
        args.markdown.write_text(markdown(rows))
    if args.plot:
        from plot import draw

        draw(rows, args.plot)
    return 1 if header["failed"] else 0


def joined(paths: list[Path]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Put what several runs wrote together; what only one of them can say is a list."""
    written = [json.loads(path.read_text()) for path in paths]
    header = {key: [one["header"][key] for one in written] for key in written[0]["header"]}
    header = {
        key: values[0] if all(value == values[0] for value in values) else values for key, values in header.items()
    }
    for key in ("failed", "not installed"):
        header[key] = [text for one in written for text in one["header"][key]]
    return header, [row for one in written for row in one["rows"]]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [peer.name for peer in PEERS]
    parser.add_argument("--peers", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES), help="of the state")
    parser.add_argument("--mib", type=int, default=256, help="MiB per rank, a multiple of 8")
    parser.add_argument("--rounds", type=int, default=5, help="how often; the median counts")
    parser.add_argument("--timeout-s", type=float, default=240, help="a launch is killed after so many seconds")
    parser.add_argument("--quick", action="store_true", help="small, and torch's own only, in under 30 s")
    parser.add_argument("--again", type=Path, nargs="+", metavar="FILE", help="show what --json wrote, measure nothing")
    parser.add_argument("--list", action="store_true", help="say what is installed, and how to install the rest")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file")
    parser.add_argument("--plot", type=Path, help="draw them into this file")
    args = parser.parse_args()
    if args.mib < 8 or args.mib % 8:
        parser.error("--mib must be a multiple of 8")
    if args.quick:
        args.mib, args.rounds, args.shapes = 16, 2, ["8 MiB tensors"]
        if args.peers == names:
            args.peers = [peer.name for peer in PEERS if peer.package == "torch"]
    return args


def list_peers() -> int:
    for peer in OURS + PEERS:
        print(f"{peer.name}: {peer.version() or 'not installed'}; {peer.install}")
    return 0


def own_shm() -> None:
    """Start again with a /dev/shm of our own, where we may: then what is in it is ours, and it goes with us."""
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
