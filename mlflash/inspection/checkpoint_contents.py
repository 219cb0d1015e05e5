"""What a checkpoint holds, and where each of its bytes is, in memory or in the directory."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from ..draining.checkpoint_directory import Listed
from ..memory.node_directory import NodeDirectory
from ..memory.slot_header import Header, Kind
from ..mpi.world import World
from ..redundancy.deduplication import cuts
from ..restoring.open_in_directory import OpenInDirectory
from ..state.leaves import Entry
from ..state.manifest import Manifest
from ..state.paths import plain_leaves
from ..state.plain_values import decode_plain
from ..storage.store import open_store
from .node_memory import Node
from .restorability import Prospect
from .slot_file import RUN_NBYTES, Sealed
from .tensor_statistics import Statistics, statistics


@dataclasses.dataclass(frozen=True)
class Run:
    """Bytes of a file.

    Attributes:
        file: name of the file.
        start: position of the first byte; -1 if the bytes are compressed.
        nbytes: number of bytes.
    """

    file: str
    start: int
    nbytes: int


@dataclasses.dataclass
class Shard:
    """A part of a tensor, in one place.

    Attributes:
        entry: the part; its ``start`` has no meaning.
        rank: the rank that holds it.
        node: the node that holds it; "" in the directory.
        runs: its bytes, in order. Empty if some of them are on other nodes.
        numbers: its statistics, if they were requested.
    """

    entry: Entry
    rank: int
    node: str
    runs: tuple[Run, ...]
    numbers: Statistics | None = None


@dataclasses.dataclass
class Contents:
    """What a checkpoint holds.

    Attributes:
        shards: shards of its tensors, by rank and in the order of the state.
        plain: its plain leaves by path, from the lowest rank that is there.
        provenance: provenance of a checkpoint in memory, from the manifest of that rank.
    """

    shards: list[Shard] = dataclasses.field(default_factory=list)
    plain: dict[str, Any] = dataclasses.field(default_factory=dict)
    provenance: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Itinerary:
    """The files to read for a checkpoint.

    Attributes:
        slots: node, file and header for each rank that has a slot.
        shares: files of shared state, by node, lowest rank of the set, and number.
    """

    slots: dict[int, tuple[str, str, Header]]
    shares: dict[tuple[str, int, int], tuple[str, Header]]


def plan(nodes: Sequence[Node], of: Prospect) -> Itinerary:
    """Choose the files to read for an attempt: the first slot of each rank."""
    slots: dict[int, tuple[str, str, Header]] = {}
    shares = {}
    for node in nodes:
        for file, header in node.sealed:
            if header.attempt == of.attempt and header.kind is Kind.SLOT:
                if header.rank not in slots or (slots[header.rank][0] != header.node and node.name == header.node):
                    slots[header.rank] = (node.name, file.name, header)
            elif header.attempt == of.attempt and header.kind is Kind.SHARE:
                shares[node.name, header.shared_by, header.share] = (file.name, header)
    return Itinerary(dict(sorted(slots.items())), shares)


def read_memory(memory: str, job: str, here: Sequence[Node], way: Itinerary, wanted: str | None, numbers: bool
                ) -> Contents:  # fmt: skip
    """Read the parts of a checkpoint that are on some nodes.

    Args:
        memory, job: the memory file system and the job.
        here: the nodes that this process looks at.
        way: the files to read.
        wanted: name or pattern of tensors and plain leaves. None: all.
        numbers: make statistics.

    Raises:
        Changed: a file was written while it was read.
        CorruptSlot: a manifest is damaged.
    """
    found = Contents()
    for node in here:
        mine = {rank: (file, header) for rank, (name, file, header) in way.slots.items() if name == node.name}
        if not mine:
            continue
        held = NodeDirectory(memory, job, node.emulated, make=False)
        try:
            for rank, (file, header) in mine.items():
                with Sealed(held, file, header) as sealed:
                    manifest = sealed.manifest()
                    if rank == min(way.slots):
                        found.plain, found.provenance = plain_of(manifest, wanted), manifest.provenance
                    for entry in manifest.entries:
                        if matches(entry.name, wanted):
                            shard = Shard(entry, rank, node.name, _runs(node.name, file, header, manifest, entry, way))
                            if numbers and (shard.runs or not entry.nbytes):
                                shard.numbers = statistics(entry, _bytes(held, sealed, node.name, shard, way))
                            found.shards.append(shard)
                    sealed.check()
        finally:
            held.close()
    return found


def _runs(node: str, file: str, header: Header, manifest: Manifest, entry: Entry, way: Itinerary) -> tuple[Run, ...]:
    extents, shared = header.extents, manifest.shared
    first = entry.start - extents.payload_nbytes
    if first < 0 or not entry.nbytes or shared is None:
        return (Run(file, extents.payload_start + entry.start, entry.nbytes),)
    runs = []
    for number, (low, high) in enumerate(itertools.pairwise(cuts(shared.nbytes, shared.shares))):
        begin, end = max(first, low), min(first + entry.nbytes, high)
        if begin < end:
            where = way.shares.get((node, shared.by, number))
            if where is None:
                return ()
            name, of_share = where
            runs.append(Run(name, of_share.extents.payload_start + begin - low, end - begin))
    return tuple(runs)


def _bytes(held: NodeDirectory, sealed: Sealed, node: str, shard: Shard, way: Itinerary) -> Iterator[np.ndarray]:
    headers = {file: header for (of, _, _), (file, header) in way.shares.items() if of == node}
    for run in shard.runs:
        if run.file == sealed.name:
            yield from _pieces(sealed.read, run)
            continue
        with Sealed(held, run.file, headers[run.file]) as share:
            yield from _pieces(share.read, run)
            share.check()


def read_directory(path: str, one: Listed, wanted: str | None, numbers: bool) -> Contents:
    """Read the contents of a drained checkpoint. Bytes for statistics are verified.

    Raises:
        CorruptSlot: a file is damaged.
    """
    found = Contents()
    drained = OpenInDirectory(World(None, 0, math.inf), open_store(path), one)
    try:
        for rank in range(drained.world_size):
            its = drained.index(rank)
            if rank == 0:
                found.plain = plain_of(its.manifest, wanted)
            for entry, place in its.pieces:
                if matches(entry.name, wanted):
                    run = Run(f"{one.folder}/{its.places.data}", -1 if place.packed else place.start, place.nbytes)
                    shard = Shard(entry, rank, "", (run,))
                    if numbers:
                        shard.numbers = statistics(entry, drained.content(rank, entry.name, place))
                    found.shards.append(shard)
    finally:
        drained.close()
    return found


def _pieces(read: Callable[[int, int], np.ndarray], run: Run) -> Iterator[np.ndarray]:
    for at in range(0, run.nbytes, RUN_NBYTES):
        yield read(run.start + at, min(RUN_NBYTES, run.nbytes - at))


def plain_of(manifest: Manifest, wanted: str | None) -> dict[str, Any]:
    """Return the decoded plain leaves of a manifest by path."""
    paths = plain_leaves(manifest.tree)
    return {path: decode_plain(manifest.plain[number]) for path, number in paths.items() if matches(path, wanted)}


def matches(name: str, wanted: str | None) -> bool:
    """Say whether a name is the wanted one, or matches its pattern (``model.*.weight``)."""
    return wanted is None or name == wanted or fnmatchcase(name, wanted)


def attempt_to_show(prospects: Sequence[Prospect], step: int) -> Prospect | None:
    """Return the newest attempt of a step in memory that can be restored, else the newest one that has files."""
    of_step = [one for one in prospects if one.step == step]
    return next((one for one in of_step if one.choice is not None), of_step[0] if of_step else None)
