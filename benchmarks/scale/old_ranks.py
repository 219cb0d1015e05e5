"""Measures what one rank needs to learn what all old ranks hold, and to find the parts of its own state.

    python benchmarks/scale/old_ranks.py [--old 10000] [--new 9992] [--leaves 3000] [--json FILE]

It runs the code of mlflash in one process. What other ranks would send is generated in the form in which they send it:
messages for memory, and the file that commits the checkpoint for a directory. Until format version 2, each rank read
the manifest of every old rank. The row `before` measures that on 40 manifests and multiplies it. The program exits with
1 if a rank needs more than 50 MB or 2 s of CPU time.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pickle
import sys
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mlflash.draining import file_index, rank_table
from mlflash.draining.file_index import Place, Places, Stored
from mlflash.mpi.world import World
from mlflash.protocol.describe_ranks import Described, Gathered, gather_ranks, gathering
from mlflash.state import manifest
from mlflash.state.leaves import Entry, Tree
from mlflash.state.old_ranks import OldRanks

MOST_MB, MOST_S = 50.0, 2.0
KINDS = 12  # distinct global shapes
_BEFORE = 40  # number of manifests read to measure the cost of one


def entries_of(rank: int, ranks: int, old: int, leaves: int) -> list[Entry]:
    """Give shards of a dozen shapes for any number of ranks. One leaf of 30 is whole."""
    found, at = [], 0
    for n in range(leaves):
        whole = (4,) if n % 30 == 29 else (2 * old + 64 * (n % KINDS), 8)
        low, high = (0, 4) if len(whole) == 1 else (whole[0] * nth // ranks for nth in (rank, rank + 1))
        offset, shape = (low, *(0 for _ in whole[1:])), (high - low, *whole[1:])
        name = f"model.layers.{n // 12}.block.projection_{n % 12}.weight"
        nbytes = 4 * int(np.prod(shape))
        found.append(Entry(name, "tensor", "float32", whole, offset, shape, at, nbytes))
        at += nbytes
    return found


def tree_of(leaves: int) -> Tree:
    """Give a tree of all leaves and of 8 plain values, two of which differ between ranks."""
    return ["d", [["tensors", ["l", [["e", n] for n in range(leaves)]]], ["own", ["l", [["p", n] for n in range(8)]]]]]


def plain_of(rank: int) -> list[Any]:
    return [7, "adam", 0.5, None, rank, f"seed {rank}", True, 1]


class Others:
    """The ranks that tell one rank what they hold. Each describes the old rank of the same number."""

    def __init__(self, old: int, leaves: int):
        self.old, self.leaves = old, leaves
        self.first, self.last = self.described(0), self.described(old - 1)
        # Shards of some ranks are a row larger. The messages of all others are made from those of these two ranks.
        self.rows = [self._told(rank) for rank in range(old)]

    def described(self, rank: int) -> Described:
        entries = entries_of(rank, self.old, self.old, self.leaves)
        checks = {n: 5 for n, entry in enumerate(entries) if entry.shape == entry.global_shape}
        return Described.of(entries, tree_of(self.leaves), plain_of(rank), checks, (rank, 0, {}))

    def row_of(self, rank: int) -> np.ndarray:
        row, its = self.first.row.copy(), self.first.structure
        for at, dims in zip(its.starts, its.dims, strict=False):
            if dims == 2:
                low, high = (int(row[at]) * nth // self.old for nth in (rank, rank + 1))
                row[at + 2], row[at + 4] = low, high - low
        return row

    def _told(self, rank: int) -> bytes:
        own = zlib.compress(pickle.dumps({4: rank, 5: f"seed {rank}"}), 1)
        return zlib.compress(pickle.dumps({rank: (self.row_of(rank).tobytes(), own, (rank, 0, {}))}), 1)

    def answers(self, rank: int) -> Iterator[Callable[[Any], Any]]:
        """Give the results of all agreements, one after the other."""
        key = self.first.structure.key
        yield lambda mine: [{one: key} for one in range(self.old)]
        yield lambda mine: [mine or {key: (self.first.structure, self.first.plain)}]
        yield self._extremes
        yield lambda mine: self.rows

    def _extremes(self, mine: list[int]) -> list[int]:
        low, high = np.array(mine, dtype=np.int64).reshape(2, -1)
        low[-4:-2], high[-4:-2] = -5, ~np.int64(9)  # the plain values that differ between ranks
        return [*low.tolist(), *high.tolist()]


@dataclasses.dataclass
class Row:
    """What one rank needed: CPU seconds, and the peak memory of Python.

    Attributes:
        received_mb: size of what the other ranks sent, or of the file that commits.
        collectives: number of collectives.
        parts: number of parts of its state.
        ranks: number of old ranks that hold these parts, which is the number of files that it opens.
    """

    what: str
    seconds: float
    mb: float
    received_mb: float = 0.0
    collectives: int = 0
    parts: int = 0
    ranks: int = 0


def measured(what: str, work: Callable[[Row], None]) -> Row:
    """Measure seconds, then run again to measure memory, which is slower."""
    row = Row(what, 0.0, 0.0)
    begun = time.process_time()
    work(row)
    seconds = time.process_time() - begun
    tracemalloc.start()
    row = Row(what, 0.0, 0.0)
    work(row)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return dataclasses.replace(row, seconds=seconds, mb=most / 1e6)


def in_memory(row: Row, others: Others, rank: int, new: int) -> None:
    """Learn and plan as `OpenInMemory` and `resharding` do it."""
    steps, answers, answer = gathering({rank: others.described(rank)}), others.answers(rank), None
    while True:
        try:
            _, value = steps.send(answer)
        except StopIteration as end:
            gathered: Gathered = end.value
            break
        answer = next(answers)(value)
        row.collectives += 1
        row.received_mb += sum(map(_nbytes, answer)) / 1e6
    _plan(row, gathered.old_ranks(True, {}, [rank]), others, rank, new)


def _nbytes(told: Any) -> int:
    return len(told) if isinstance(told, bytes) else 8 if isinstance(told, int) else len(pickle.dumps(told))


def in_directory(row: Row, raw: bytes, own: bytes, others: Others, rank: int, new: int) -> None:
    """Learn and plan as `OpenInDirectory` and `resharding` do it. ``own`` is the index of one rank's file."""
    row.received_mb, row.collectives = len(raw) / 1e6, 1
    index = file_index.decode(own, "rank-00000.h5", 1 << 60)
    assert len(index.manifest.entries) == others.leaves
    table = rank_table.decode(zlib.decompress(raw), others.old)
    olds = OldRanks(table.groups, table.differ, table.plain_differ, lambda _: table.groups[0].plain, {})
    _plan(row, olds, others, rank, new)


def _plan(row: Row, olds: OldRanks, others: Others, rank: int, new: int) -> None:
    ranks = set()
    assert olds[rank if rank in olds else 0].entries and olds.plain_differ
    for entry in entries_of(rank, new, others.old, others.leaves):
        for part in olds.parts(entry, rank) or ():
            row.parts += 1
            ranks.add(part.rank)
    row.ranks = len(ranks)


def master_of(others: Others) -> bytes:
    """Give the index of the file that would commit the checkpoint, compressed as ranks receive it."""
    olds = {rank: dataclasses.replace(others.first, row=others.row_of(rank), plain=plain_of(rank), more=(-1, -1, -1))
            for rank in range(others.old)}  # fmt: skip
    files = [Stored(f"rank-{rank:05d}.h5", 1, 1, f"rank-{rank:05d}.h5", 1) for rank in range(others.old)]
    return zlib.compress(rank_table.encode("hdf5", "job", files, gather_ranks(World(None, 0, math.inf), olds)), 1)


def index_of(text: bytes, entries: Sequence[Entry]) -> bytes:
    """Give the index of a rank's file."""
    of = {n: Place(its.start, its.nbytes, 0, its.shape[0], n, False) for n, its in enumerate(entries)}
    places = Places("rank-00000.h5", 1 << 20, np.zeros(len(entries), dtype="<u8"), of)
    return file_index.encode(text, 1 << 60, places)[0]


def before(row: Row, text: bytes, old: int) -> None:
    """Read manifests, as each rank did with the manifests of all ranks."""
    kept = [manifest.decode(text, 1 << 60) for _ in range(_BEFORE)]
    row.received_mb, row.ranks = len(text) * old / 1e6, len(kept) and old


def manifest_of(others: Others, entries: Sequence[Entry]) -> bytes:
    """Give the manifest of the first rank."""
    tree = manifest.encode_tree(others.first.structure.tree)
    return manifest.join(manifest.encode_entries(tuple(entries)), tree, others.first.plain)


def learn(old: int, leaves: int) -> dict[str, Row]:
    """Measure what a rank needs to learn what the old ranks hold if a node of 8 is lost."""
    others, entries, new = Others(old, leaves), entries_of(0, old, old, leaves), old - 8
    raw, own = master_of(others), index_of(manifest_of(others, entries), entries)
    rank = new // 2
    return {"memory": measured("memory", lambda row: in_memory(row, others, rank, new)),
            "directory": measured("directory", lambda row: in_directory(row, raw, own, others, rank, new))}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--old", type=int, default=10_000, help="number of ranks that saved the checkpoint")
    parser.add_argument(
        "--new", type=int, nargs="+", default=[10_000, 9_992, 5_000, 100], help="numbers of ranks that restore it"
    )
    parser.add_argument("--leaves", type=int, default=3_000, help="number of leaves of each rank")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    args = parser.parse_args()
    others = Others(args.old, args.leaves)
    entries = entries_of(0, args.old, args.old, args.leaves)
    text = manifest_of(others, entries)
    old = measured("before", lambda row: before(row, text, args.old))
    rows = [dataclasses.replace(old, seconds=old.seconds / _BEFORE * args.old, mb=old.mb / _BEFORE * args.old)]
    raw, own, wrong = master_of(others), index_of(text, entries), False
    for new in args.new:
        rank = new // 2
        rows.append(measured(f"from memory, on {new:,}", lambda row: in_memory(row, others, rank, new)))  # noqa: B023
        rows.append(measured(f"from directory, on {new:,}", lambda row: in_directory(row, raw, own, others, rank, new)))  # noqa: B023
        wrong |= any(row.mb > MOST_MB or row.seconds > MOST_S for row in rows[-2:])
    print(f"{args.old:,} old ranks with {args.leaves:,} leaves each; numbers of one rank that restores:")
    print(f"{'':24}{'CPU s':>10}{'MB':>10}{'MB received':>13}{'collectives':>13}{'parts':>10}{'old ranks':>11}")
    for row in rows:
        print(f"{row.what:24}{row.seconds:10.2f}{row.mb:10.1f}{row.received_mb:13.2f}{row.collectives:13}{row.parts:10}"
              f"{row.ranks:11}")  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
