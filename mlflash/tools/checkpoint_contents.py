"""What a checkpoint holds, and where each of its bytes is, in memory or in the directory."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import xxhash

from ..drain.checkpoint_directory import Listed
from ..memory.node_directory import NodeDirectory
from ..memory.slot import Header, Kind
from ..mpi.world import World
from ..placement.topology import this_node
from ..protect.deduplication import cuts
from ..restore.open_in_directory import OpenInDirectory
from ..state.leaves import Entry
from ..state.manifest import Manifest
from ..state.paths import plain_leaves
from ..state.plain_values import decode_plain
from ..storage.store import open_store
from .node_memory import RUN_NBYTES, Node, Sealed
from .restorability import Prospect

_NUMPY = {
    "bool": "|u1", "uint8": "|u1", "int8": "|i1", "int16": "<i2", "uint16": "<u2", "float16": "<f2",
    "int32": "<i4", "uint32": "<u4", "float32": "<f4", "int64": "<i8", "uint64": "<u8", "float64": "<f8",
    "complex64": "<c8", "complex128": "<c16", "bfloat16": "<u2",
}  # fmt: skip
_BY_TORCH = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")


@dataclasses.dataclass
class Statistics:
    """Statistics of numbers. For complex numbers they are of the magnitudes."""

    count: int = 0
    nan: int = 0
    inf: int = 0
    zeros: int = 0
    low: float | None = None
    high: float | None = None
    mean: float = 0.0
    squares: float = 0.0  # sum of the squared distances from the mean
    check: int = 0  # XXH3-64 of the bytes

    @property
    def std(self) -> float | None:
        return math.sqrt(self.squares / self.count) if self.count else None

    def add(self, values: np.ndarray) -> None:
        wide = np.abs(values).ravel() if values.dtype.kind == "c" else values.ravel().astype(np.float64)
        good = wide[np.isfinite(wide)]
        mean = float(good.mean()) if good.size else 0.0
        low, high = (float(good.min()), float(good.max())) if good.size else (None, None)
        self.join(Statistics(good.size, int(np.isnan(wide).sum()), int(np.isinf(wide).sum()), int((good == 0).sum()),
                             low, high, mean, float(np.square(good - mean).sum())))  # fmt: skip

    def join(self, other: Statistics) -> None:
        """Add other statistics.

        Source: Chan, Golub, LeVeque: Updating formulae for computing sample variances, 1979.
        """
        count, apart = max(1, self.count + other.count), other.mean - self.mean
        self.squares += other.squares + apart * apart * self.count * other.count / count
        self.mean += apart * other.count / count
        self.low = min((low for low in (self.low, other.low) if low is not None), default=None)
        self.high = max((high for high in (self.high, other.high) if high is not None), default=None)
        for name in ("count", "nan", "inf", "zeros"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def to_json(self) -> dict[str, Any]:
        return {"finite": self.count, "nan": self.nan, "inf": self.inf, "zeros": self.zeros, "min": self.low,
                "max": self.high, "mean": self.mean if self.count else None, "std": self.std,
                "check": f"{self.check:016x}"}  # fmt: skip


def statistics(entry: Entry, pieces: Iterable[np.ndarray]) -> Statistics:
    """Make statistics of the bytes of an entry."""
    found, check = Statistics(), xxhash.xxh3_64()
    for whole in _whole_items(entry, pieces):
        check.update(whole.data)
        values = _values(entry, whole)
        if values is not None and values.size:
            found.add(values)
    found.check = check.intdigest()
    return found


def _whole_items(entry: Entry, pieces: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Cut pieces of bytes at the borders of elements."""
    item = entry.nbytes // max(1, math.prod(entry.shape)) or 1
    rest = np.empty(0, dtype=np.uint8)
    for piece in pieces:
        raw = np.concatenate([rest, piece]) if rest.size else np.ascontiguousarray(piece)
        end = raw.size // item * item
        rest = raw[end:]
        if end:
            yield raw[:end]


def _values(entry: Entry, raw: np.ndarray) -> np.ndarray | None:
    if entry.kind == "array":
        dtype = np.dtype(entry.dtype)
        return raw.view(dtype) if dtype.kind in "biufc" else None
    if entry.dtype in _BY_TORCH:
        import torch

        if not hasattr(torch, entry.dtype):
            return None
        numbers: np.ndarray = torch.from_numpy(raw.copy()).view(getattr(torch, entry.dtype)).float().numpy()
        return numbers
    if entry.dtype not in _NUMPY:
        return None
    values = raw.view(_NUMPY[entry.dtype])
    return (values.astype(np.uint32) << 16).view(np.float32) if entry.dtype == "bfloat16" else values


@dataclasses.dataclass(frozen=True)
class Run:
    """Bytes of a file."""

    file: str
    start: int  # position of the first byte; -1 if the bytes are compressed
    nbytes: int


@dataclasses.dataclass
class Shard:
    """A part of a tensor, in one place."""

    entry: Entry  # the part; its ``start`` has no meaning
    rank: int
    node: str
    runs: tuple[Run, ...]  # its bytes, in order. Empty if some of them are on other nodes
    numbers: Statistics | None = None


@dataclasses.dataclass
class Contents:
    """What a checkpoint holds. Plain leaves and provenance (of memory) are those of the lowest rank that is there."""

    shards: list[Shard] = dataclasses.field(default_factory=list)
    plain: dict[str, Any] = dataclasses.field(default_factory=dict)
    provenance: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Itinerary:
    """The files to read for a checkpoint."""

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


def read_memory(memory: str, job: str, node: str, way: Itinerary, wanted: str | None, numbers: bool) -> Contents:
    """Read the parts of a checkpoint that are on a node: what the name or pattern ``wanted`` matches; None: all.

    Raises:
        Changed: a file was written while it was read.
    """
    found = Contents()
    mine = {rank: (file, header) for rank, (name, file, header) in way.slots.items() if name == node}
    if not mine:
        return found
    with contextlib.closing(NodeDirectory(memory, job, make=False)) as held:
        for rank, (file, header) in mine.items():
            with Sealed(held, file, header) as sealed:
                manifest = sealed.manifest()
                if rank == min(way.slots):
                    found.plain, found.provenance = plain_of(manifest, wanted), manifest.provenance
                for entry in manifest.entries:
                    if matches(entry.name, wanted):
                        shard = Shard(entry, rank, node, _runs(node, file, header, manifest, entry, way))
                        if numbers and (shard.runs or not entry.nbytes):
                            shard.numbers = statistics(entry, _bytes(held, sealed, node, shard, way))
                        found.shards.append(shard)
                sealed.check()
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
    """Read the contents of a drained checkpoint. Bytes for statistics are verified."""
    found = Contents()
    drained = OpenInDirectory(World(None, this_node(), math.inf), open_store(path), one)
    try:
        for rank in range(drained.world_size):
            its = drained.index(rank)
            if rank == 0:
                found.plain = plain_of(its.manifest, wanted)
            for entry, place in its.pieces:
                if matches(entry.name, wanted):
                    run = Run(f"{one.folder}/{its.data}", -1 if place.packed else place.start, place.nbytes)
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
