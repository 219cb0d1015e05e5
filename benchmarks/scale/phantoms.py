"""What phantoms report about the checkpoint that they hold, in the form in which ranks do, and their requests to the
directory.

A phantom holds the same as the lowest live rank, except that tensors cut over the nodes have the rows of its own node.
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
"""Of a thread that stands for a trainer: its ``rank`` and its ``fabric``."""


@dataclasses.dataclass(frozen=True)
class Olds:
    """Who describes which rank of a checkpoint: a rank on its node, or on that which has the copies of a lost node.

    Attributes:
        ranks: of the job that saved it.
        size: of the job that describes it, on the same nodes, at least as many.
        nodes: of both.
        live: ranks of the second job that describe what they have themselves.
        told: ranks of the checkpoint that these have.
        lost: a node, and the one that has its copies; None: none is.
    """

    ranks: int
    size: int
    nodes: int
    live: Sequence[int]
    told: Sequence[int]
    lost: tuple[int, int] | None = None

    def node_of(self, rank: int) -> int:
        """The node that a rank of the checkpoint was on."""
        return rank * self.nodes // self.ranks

    def of(self, process: int) -> list[int]:
        """The ranks that a phantom describes."""
        now, before = self.size // self.nodes, self.ranks // self.nodes
        node, local = divmod(process, now)
        on = [node] if self.lost is None else {self.lost[0]: [], self.lost[1]: [node, self.lost[0]]}.get(node, [node])
        mine = [its * before + local for its in on] if local < before else []
        return [rank for rank in mine if rank not in self.told]


def of_ranks(mine: Mapping[int, Described], olds: Olds, pack: Pack, more: Callable[[int, int, Any], Any]
             ) -> list[Answer]:  # fmt: skip
    """What phantoms bring to the three gathers of `describe_ranks`, where a live rank brings ``mine``.

    Args:
        pack: how a value is packed on its way.
        more: gives `Described.more` of an old rank that a process describes, from that of a live one.
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
    """The numbers of a rank of another node: of the only class, which has one dimension and is cut over the nodes."""
    whole, _, size = row.tolist()
    return np.array([whole, size * node % whole if size < whole else 0, size], dtype="<i8").tobytes()


def of_files(value: Sequence[tuple[Stored, Receipt]], olds: Olds, sizes: dict[str, int]) -> Answer:
    """What phantoms hand in when a drain has written all files; their sizes are added to ``sizes``."""
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
    """A directory that counts what a rank asks it for; of the files of phantoms it knows the size."""

    asked: collections.Counter[tuple[str, str]]
    sizes: Mapping[str, int]

    def count(self, asked: collections.Counter[tuple[str, str]], sizes: Mapping[str, int]) -> CountedDirectory:
        """Count from now on. Gives itself."""
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
    """Let phantoms answer what ranks gather, and requests to the directory be counted, until the block ends.

    Args:
        module: makes what mlflash takes for the module mpi4py.MPI.
    """
    gather_ranks, collect, begin = open_in_memory.gather_ranks, BackgroundCollectives.collect, DrainQueue.__init__
    gather, commit = _OnItsWay._gather, _OnItsWay._commit

    def of_memory(ranks: Any, mine: Mapping[int, Described]) -> Any:
        twice: Pack = lambda value: pickle.dumps(pickle.dumps(value))  # by `Ranks`, and by `World`
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
