"""What one rank needs to learn what all ranks of a checkpoint hold, and of what its own state is made.

    python benchmarks/scale/old_ranks.py [--old 10000] [--new 9992] [--leaves 3000]

The code of mlflash itself, on one process: what the other ranks would tell it is made up, in the form in which they tell
it. `before` is what each rank did with the manifest of every old rank, done for 40 of them and multiplied.
"""

from __future__ import annotations

import argparse
import dataclasses
import pickle
import sys
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mlflash.protocol.describe_ranks import Described, Gathered, gathering
from mlflash.state import manifest
from mlflash.state.leaves import Entry, Tree
from mlflash.state.old_ranks import OldRanks

KINDS = 12  # distinct global shapes
_BEFORE = 40  # manifests that are read to measure what each costs


def state(rank: int, ranks: int, leaves: int) -> tuple[list[Entry], Tree, list[Any]]:
    """Entries, tree and plain leaves of a rank: shards of a dozen shapes, a few small tensors, values of its own."""
    entries, at = [], 0
    for n in range(leaves):
        if n % 30 == 29:
            whole: tuple[int, ...] = (4,)
            offset, shape = (0,), whole
        else:
            whole = (2 * ranks + 64 * (n % KINDS), 8)
            low, high = (whole[0] * at_rank // ranks for at_rank in (rank, rank + 1))
            offset, shape = (low, 0), (high - low, 8)
        nbytes = 4 * int(np.prod(shape))
        name = f"model.layers.{n // 12}.block.projection_{n % 12}.weight"
        entries.append(Entry(name, "tensor", "float32", whole, offset, shape, at, nbytes))
        at += nbytes
    tree = ["d", [["tensors", ["l", [["e", n] for n in range(leaves)]]],
                  ["own", ["l", [["p", n] for n in range(8)]]]]]  # fmt: skip
    return entries, tree, [7, "adam", 0.5, None, rank, f"seed {rank}", True, 1]


class Others:
    """All ranks, of which one is this process: what the others tell it is made of what it tells them."""

    def __init__(self, rank: int, ranks: int, leaves: int):
        self.rank, self.ranks, self.leaves = rank, ranks, leaves
        self.nbytes, self.collectives = 0, 0

    def describe(self, rank: int) -> Described:
        entries, tree, plain = state(rank, self.ranks, self.leaves)
        checks = {n: 5 for n, entry in enumerate(entries) if entry.shape == entry.global_shape}
        return Described.of(entries, tree, plain, checks, (rank, 0, {}))

    def answers(self) -> Iterator[Callable[[Any], Any]]:
        """What comes back for each thing that is agreed on."""
        others = [rank for rank in range(self.ranks) if rank != self.rank]
        yield lambda mine: [mine] + [{rank: mine[self.rank]} for rank in others]
        yield lambda mine: [mine or {self.first.structure.key: (self.first.structure, self.first.plain)}]
        yield self._extremes
        packed = [self._row(rank) for rank in others]
        yield lambda mine: [mine, *packed]

    @property
    def first(self) -> Described:
        return self.describe(0)

    def _extremes(self, mine: list[int]) -> list[int]:
        low, high = np.array(mine, dtype=np.int64).reshape(2, -1)
        low[-4], high[-4] = -5, ~np.int64(9)  # the values of its own
        return [*low.tolist(), *high.tolist()]

    def _row(self, rank: int) -> bytes:
        if not hasattr(self, "_like"):
            self._like = self.describe(0)
        row = self._like.row.copy()
        for at, dims in zip(self._like.structure.starts, self._like.structure.dims, strict=False):
            if dims == 2:
                low, high = (int(row[at]) * n // self.ranks for n in (rank, rank + 1))
                row[at + 2], row[at + 4] = low, high - low
        own = zlib.compress(pickle.dumps({4: rank, 5: f"seed {rank}"}), 1)
        return zlib.compress(pickle.dumps({rank: (row.tobytes(), own, (rank, 0, {}))}), 1)


def learn(others: Others) -> Gathered:
    """Do what a rank does, but for the wait."""
    steps, answers, answer = gathering({others.rank: others.describe(others.rank)}), others.answers(), None
    while True:
        try:
            _, value = steps.send(answer)
        except StopIteration as end:
            gathered: Gathered = end.value
            return gathered
        answer = next(answers)(value)
        others.collectives += 1
        others.nbytes += len(pickle.dumps(answer))


def plan(olds: OldRanks, rank: int, new: int, leaves: int) -> tuple[int, set[int]]:
    """Find of what the state of a new rank is made; gives how many parts that are, and of which old ranks."""
    parts, ranks = 0, set()
    for entry in state(rank, new, leaves)[0]:
        whole = olds.groups[0].structure
        rows = tuple(whole.entries(olds.groups[0].rows[0])[0].global_shape) if False else None
        del whole, rows
        for part in olds.parts(entry, rank) or ():
            parts += 1
            ranks.add(part.rank)
    return parts, ranks
