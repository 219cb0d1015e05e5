"""Generates what phantoms report about the checkpoint that they hold, and counts the requests to the directory.

A phantom holds the same as the lowest live rank. Only tensors sharded over the nodes have the rows of its own node.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import pickle
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np
from scale.meeting import Fabric

import mlflash.mpi.world
from mlflash.draining.drain_input import Receipt
from mlflash.draining.drain_queue import DrainQueue
from mlflash.draining.file_index import Stored
from mlflash.draining.write_checkpoint import _OnItsWay
from mlflash.mpi.background_collectives import BackgroundCollectives
from mlflash.protocol.describe_ranks import Described
from mlflash.restoring import open_in_memory, restore
from mlflash.storage.store import Directory

Pack = Callable[[Any], bytes]
Answer = Callable[[], list[bytes | None]]

here = threading.local()
"""The ``rank`` and the ``fabric`` of a thread that runs a trainer."""


@dataclasses.dataclass(frozen=True)
class Olds:
    """Tells which rank describes which rank of a checkpoint.

    It is a rank on the same node. For a lost node it is a rank on the node that holds its copies.

    Attributes:
        ranks: ranks of the job that saved the checkpoint.
        size: ranks of the job that describes it, at least as many, on the same nodes.
        nodes: number of nodes of both jobs.
        live: live ranks of the second job. They describe what they hold themselves.
        told: ranks of the checkpoint that the live ranks hold.
        lost: the lost node, and the node that holds its copies. None if no node is lost.
    """

    ranks: int
    size: int
    nodes: int
    live: Sequence[int]
    told: Sequence[int]
    lost: tuple[int, int] | None = None

    def node_of(self, rank: int) -> int:
        """Give the node of a rank of the checkpoint."""
        return rank * self.nodes // self.ranks

    def of(self, process: int) -> list[int]:
        """Give the ranks that a phantom describes."""
        now, before = self.size // self.nodes, self.ranks // self.nodes
        node, local = divmod(process, now)
        on = [node] if self.lost is None else {self.lost[0]: [], self.lost[1]: [node, self.lost[0]]}.get(node, [node])
        mine = [its * before + local for its in on] if local < before else []
        return [rank for rank in mine if rank not in self.told]


def of_ranks(mine: Mapping[int, Described], olds: Olds, pack: Pack, more: Callable[[int, int, Any], Any]
             ) -> list[Answer]:  # fmt: skip
    """Generate what phantoms contribute to the three gathers of `describe_ranks` when a live rank contributes ``mine``.

    Args:
        pack: packs a value for its way.
        more: gives `Described.more` of an old rank, from that process and from the value of a live rank.
    """
    one = mine[min(mine)]
    key = one.structure.key

    def keys(process: int) -> Any:
        return dict.fromkeys(olds.of(process), key)

    def rows(process: int) -> Any:
        told = {rank: (_moved(one.row, olds.node_of(rank)), b"", more(rank, process, one.more))
                for rank in olds.of(process)}  # fmt: skip
        return zlib.compress(pickle.dumps(told), 1)

    def answer(value: Callable[[int], Any]) -> Answer:
        return lambda: [None if process in olds.live else pack(value(process)) for process in range(olds.size)]

    return [answer(keys), answer(lambda process: {}), answer(rows)]


def _moved(row: np.ndarray, node: int) -> bytes:
    """Give the row of a rank on another node. The only tensor has one dimension, which is sharded over the nodes."""
    whole, _, size = row.tolist()
    return np.array([whole, size * node % whole if size < whole else 0, size], dtype="<i8").tobytes()


def of_files(value: Sequence[tuple[Stored, Receipt]], olds: Olds, sizes: dict[str, int]) -> Answer:
    """Generate what phantoms hand in after a drain wrote all files, and add the sizes of the files to ``sizes``."""
    ((stored, receipt),) = value

    def handed_in(rank: int) -> bytes:
        names = {name: getattr(stored, name).replace(f"{receipt.rank:05d}", f"{rank:05d}") for name in ("card", "data")}
        its = dataclasses.replace(stored, **names)
        sizes[its.card], sizes[its.data] = its.nbytes, its.data_nbytes
        pieces = [(dataclasses.replace(entry, offset=(entry.nbytes // 4 * olds.node_of(rank),)), alike, check)
                  for entry, alike, check in receipt.pieces]  # fmt: skip
        told = its, dataclasses.replace(receipt, rank=rank, pieces=pieces, objects=None)
        return zlib.compress(pickle.dumps([told]), 1)

    return lambda: [None if rank in olds.live else handed_in(rank) for rank in range(olds.size)]


class CountedDirectory(Directory):
    """A directory that counts the requests of a rank. It knows the sizes of the files of phantoms."""

    asked: collections.Counter[tuple[str, str]]
    sizes: Mapping[str, int]

    def count(self, asked: collections.Counter[tuple[str, str]], sizes: Mapping[str, int]) -> CountedDirectory:
        """Count from now on. Returns the directory itself."""
        self.asked, self.sizes = asked, sizes
        return self

    def at(self, name: str) -> CountedDirectory:
        return CountedDirectory(super().at(name).path, below=True).count(self.asked, self.sizes)

    def names(self) -> list[str]:
        self.asked["list", self.path] += 1
        return super().names()

    def read(self, name: str, start: int = 0, nbytes: int | None = None) -> bytes:
        self.asked["read", name] += 1
        return super().read(name, start, nbytes)

    def open(self, name: str) -> Any:
        self.asked["open", name] += 1
        return super().open(name)

    def nbytes(self, name: str) -> int:
        self.asked["stat", name] += 1
        return self.sizes[name] if name in self.sizes else super().nbytes(name)

    def write(self, name: str, content: Iterable[Any], tag: str = "") -> int:
        self.asked["write", name] += 1
        return super().write(name, content, tag)

    def remove(self, name: str) -> None:
        self.asked["remove", name] += 1
        super().remove(name)


@contextlib.contextmanager
def standing_in(module: Callable[[], Any]) -> Iterator[None]:
    """Generate what phantoms contribute, and count requests to the directory, until the block ends.

    Args:
        module: creates the object that replaces the module mpi4py.MPI.
    """
    gather_ranks, collect, begin = open_in_memory.gather_ranks, BackgroundCollectives.collect, DrainQueue.__init__
    gather, commit = _OnItsWay._gather, _OnItsWay._commit

    def of_memory(ranks: Any, mine: Mapping[int, Described]) -> Any:
        twice: Pack = lambda value: pickle.dumps(pickle.dumps(value))  # packed by `Ranks`, and again by `World`
        fabric: Fabric = here.fabric
        if ranks.rank == fabric.live[0]:
            fabric.answers["world"] += of_ranks(mine, fabric.olds, twice, lambda rank, process, _: (process, rank, {}))
        return gather_ranks(ranks, mine)

    def of_drain(self: Any) -> Any:
        fabric: Fabric = self.world.world.fabric
        if self.world.rank == fabric.live[0]:
            told = of_ranks(self.described, fabric.olds, pickle.dumps, lambda rank, process, more: more)
            fabric.answers["drain"] += told
        return (yield from gather(self))

    def of_receipts(self: Any, value: Any) -> Any:
        fabric: Fabric = self._world.world.fabric
        if self._world.rank == fabric.live[0]:
            fabric.answers["drain"].append(of_files(value, fabric.olds, fabric.sizes))
        return (yield from collect(self, value))

    def timed(self: Any, *args: Any) -> None:
        begun = time.thread_time()
        commit(self, *args)
        self.world.world.fabric.alone_s += time.thread_time() - begun

    def counted(self: Any, config: Any, context: Any, *args: Any) -> None:
        begin(self, config, context, *args)
        if self.store is not None:
            fabric = context.world.world.fabric
            self.store = CountedDirectory(self.store.path).count(fabric.asked[context.world.rank], fabric.sizes)

    def opened(path: str) -> CountedDirectory:
        return CountedDirectory(path).count(here.fabric.asked[here.rank], here.fabric.sizes)

    with contextlib.ExitStack() as stack:
        for where, name, instead in (
            (mlflash.mpi.world, "load_mpi", module), (open_in_memory, "gather_ranks", of_memory),
            (_OnItsWay, "_gather", of_drain), (BackgroundCollectives, "collect", of_receipts),
            (_OnItsWay, "_commit", timed), (DrainQueue, "__init__", counted),
            (restore, "open_store", opened),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(where, name, instead))
        yield
