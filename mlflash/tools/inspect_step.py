"""The command ``mlflash inspect``: what a checkpoint holds, and where each of its bytes is."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import numpy as np
import xxhash

from ..config import Config
from ..drain.checkpoint_directory import Listed
from ..errors import CorruptSlot, MlflashError
from ..memory.node_directory import NodeDirectory
from ..memory.slot import Attempt, Header, Kind
from ..mpi.world import World, gather
from ..placement.topology import this_node
from ..protect.deduplication import cuts
from ..restore.open_in_directory import OpenInDirectory
from ..state.leaves import Entry, item_nbytes
from ..state.manifest import Manifest
from ..state.paths import plain_leaves
from ..state.plain_values import decode_plain
from ..storage.store import open_store
from ..text import many, named, show_bytes
from . import completion, on_disk
from .jobs import choose_job
from .node_memory import RUN_NBYTES, Changed, Node, Prospect, Sealed, look_around, what_is_restorable
from .on_disk import Provenance, describe, versions_of
from .options import job_options
from .output import new_table, show_age
from .run_on_ranks import Answer, together

if TYPE_CHECKING:
    from rich.console import Console

_NUMPY = {
    "bool": "|u1", "uint8": "|u1", "int8": "|i1", "int16": "<i2", "uint16": "<u2", "float16": "<f2",
    "int32": "<i4", "uint32": "<u4", "float32": "<f4", "int64": "<i8", "uint64": "<u8", "float64": "<f8",
    "complex64": "<c8", "complex128": "<c16", "bfloat16": "<u2",
}  # fmt: skip
_BY_TORCH = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
_LONGEST = 100  # of a plain leaf, characters


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

    def cells(self) -> list[str]:
        numbers = self.low, self.high, self.mean if self.count else None, self.std
        return [*("-" if number is None else f"{number:.4g}" for number in numbers), f"{self.nan:,}", f"{self.inf:,}",
                f"{self.zeros:,}"]  # fmt: skip


def statistics(entry: Entry, pieces: Iterable[np.ndarray]) -> Statistics:
    """Make statistics of the bytes of an entry."""
    joined, check = Statistics(), xxhash.xxh3_64()
    for whole in _whole_items(entry, pieces):
        check.update(whole.data)
        values = _values(entry, whole)
        if values is not None and values.size:
            joined.add(values)
    joined.check = check.intdigest()
    return joined


def _whole_items(entry: Entry, pieces: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Cut pieces of bytes at the borders of elements."""
    item = item_nbytes(entry.kind, entry.dtype)
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


class Files(NamedTuple):
    """The files to read for a checkpoint."""

    slots: dict[int, tuple[str, str, Header]]
    shares: dict[tuple[str, int, int], tuple[str, Header]]


def _files_of(nodes: Sequence[Node], attempt: Attempt) -> Files:
    """Choose the files to read for an attempt: the first slot of each rank, and one on the node of the rank before."""
    slots: dict[int, tuple[str, str, Header]] = {}
    shares = {}
    for node, file, header in [(each, *sealed) for each in nodes for sealed in each.sealed]:
        if header.attempt == attempt and header.kind is Kind.SLOT:
            if header.rank not in slots or (slots[header.rank][0] != header.node and node.name == header.node):
                slots[header.rank] = (node.name, file.name, header)
        elif header.attempt == attempt and header.kind is Kind.SHARE:
            shares[node.name, header.shared_by, header.share] = (file.name, header)
    return Files(dict(sorted(slots.items())), shares)


def _read_memory(memory: str, job: str, node: str, files: Files, wanted: str | None) -> Contents:
    """Read the parts of a checkpoint on a node: what the name or pattern ``wanted`` matches, with statistics, or all.

    Raises:
        Changed: a file was written while it was read.
    """
    contents = Contents()
    slots = {rank: (file, header) for rank, (name, file, header) in files.slots.items() if name == node}
    if not slots:
        return contents
    with contextlib.closing(NodeDirectory(memory, job, make=False)) as held:
        for rank, (file, header) in slots.items():
            with Sealed(held, file, header) as sealed:
                manifest = sealed.manifest()
                if rank == min(files.slots):
                    contents.plain, contents.provenance = _plain_of(manifest, wanted), manifest.provenance
                for entry in manifest.entries:
                    if _matches(entry.name, wanted):
                        shard = Shard(entry, rank, node, _runs(node, file, header, manifest, entry, files))
                        if wanted is not None and (shard.runs or not entry.nbytes):
                            shard.numbers = statistics(entry, _bytes(held, sealed, node, shard, files))
                        contents.shards.append(shard)
                sealed.check()
    return contents


def _runs(node: str, file: str, header: Header, manifest: Manifest, entry: Entry, files: Files) -> tuple[Run, ...]:
    extents, shared = header.extents, manifest.shared
    first = entry.start - extents.payload_nbytes
    if first < 0 or not entry.nbytes or shared is None:
        return (Run(file, extents.payload_start + entry.start, entry.nbytes),)
    runs = []
    for number, (low, high) in enumerate(itertools.pairwise(cuts(shared.nbytes, shared.shares))):
        begin, end = max(first, low), min(first + entry.nbytes, high)
        if begin < end:
            where = files.shares.get((node, shared.by, number))
            if where is None:
                return ()
            name, of_share = where
            runs.append(Run(name, of_share.extents.payload_start + begin - low, end - begin))
    return tuple(runs)


def _bytes(held: NodeDirectory, sealed: Sealed, node: str, shard: Shard, files: Files) -> Iterator[np.ndarray]:
    headers = {file: header for (of, _, _), (file, header) in files.shares.items() if of == node}
    for run in shard.runs:
        if run.file == sealed.name:
            yield from _pieces(sealed.read, run)
            continue
        with Sealed(held, run.file, headers[run.file]) as share:
            yield from _pieces(share.read, run)
            share.check()


def _read_directory(path: str, listed: Listed, wanted: str | None) -> Contents:
    """Read the contents of a drained checkpoint, as `_read_memory` does. Bytes for statistics are verified."""
    contents = Contents()
    with contextlib.closing(OpenInDirectory(World(None, this_node(), math.inf), open_store(path), listed)) as drained:
        for rank in range(drained.world_size):
            index = drained.index(rank)
            if rank == 0:
                contents.plain = _plain_of(index.manifest, wanted)
            for entry, place in index.pieces:
                if _matches(entry.name, wanted):
                    start = -1 if place.packed else place.start
                    shard = Shard(entry, rank, "", (Run(f"{listed.folder}/{index.data}", start, place.nbytes),))
                    if wanted is not None:
                        shard.numbers = statistics(entry, drained.content(rank, entry.name, place))
                    contents.shards.append(shard)
    return contents


def _pieces(read: Callable[[int, int], np.ndarray], run: Run) -> Iterator[np.ndarray]:
    for at in range(0, run.nbytes, RUN_NBYTES):
        yield read(run.start + at, min(RUN_NBYTES, run.nbytes - at))


def _plain_of(manifest: Manifest, wanted: str | None) -> dict[str, Any]:
    """Return the decoded plain leaves of a manifest by path."""
    paths = plain_leaves(manifest.tree)
    return {path: decode_plain(manifest.plain[number]) for path, number in paths.items() if _matches(path, wanted)}


def _matches(name: str, wanted: str | None) -> bool:
    """Say whether a name is the wanted one, or matches its pattern (``model.*.weight``)."""
    return wanted is None or name == wanted or fnmatchcase(name, wanted)


# The command


@click.command("inspect")
@click.argument("step", type=click.IntRange(0), shell_complete=completion.steps)
@click.argument("tensor", required=False)
@click.option("--from", "source", type=click.Choice(["memory", "directory"]),
              help="Where to look.  [default: memory, then the directory]")  # fmt: skip
@job_options
@together
def inspect_step(world: World, config: Config, job: str | None, step: int, tensor: str | None, source: str | None
                 ) -> Answer | None:  # fmt: skip
    """Show the tensors of the checkpoint of STEP: names, dtypes, shapes and sizes.

    \b
    mlflash inspect 40
    mlflash inspect 40 "model.*.weight" --directory /lustre/me/run42

    With TENSOR, a name or a pattern, it also shows statistics, and where each byte of the tensor is.
    """
    if source == "directory" and config.directory is None:
        raise click.UsageError("--from directory needs --directory")
    name = choose_job(world, config, job)
    checkpoint = None if source == "directory" else _from_memory(world, config, name, step, tensor)
    if checkpoint is None and source != "memory":
        checkpoint = _from_directory(world, config.directory, step, tensor)
    if checkpoint is None:
        raise click.ClickException(f"there is no step {step} in {source or 'memory or the directory'}"
                                   + ("" if config.directory else " (no --directory was given)"))  # fmt: skip
    is_known = world.broadcast(bool(checkpoint.contents.shards or checkpoint.contents.plain), 0)
    if tensor is not None and not is_known:
        raise click.ClickException(f"step {step} has no tensor or value {tensor!r}: `mlflash inspect {step}` lists all")
    if world.rank:
        return None
    return Answer(True, checkpoint.to_json(), lambda console: checkpoint.show(console, tensor is not None))


def _from_memory(world: World, config: Config, job: str, step: int, tensor: str | None) -> Checkpoint | None:
    """Read a step from memory. All ranks learn whether it is there; rank 0 gets what it holds. Collective."""
    nodes = look_around(world, config.memory, job)
    plan: tuple[Prospect, Files] | None = None
    if world.rank == 0:
        outlook = what_is_restorable(nodes, world.world is not None)
        of_step = [prospect for prospect in outlook.prospects if prospect.step == step]
        # The newest one that can be restored, else the newest one that has files.
        for prospect in sorted(of_step, key=lambda prospect: prospect.choice is None)[:1]:
            plan = prospect, _files_of(nodes, prospect.attempt)
    plan = world.broadcast(plan, 0)
    if plan is None:
        return None
    attempt, files = plan
    part, error = Contents(), None
    try:
        part = _read_memory(config.memory, job, world.node_name, files, tensor) if world.local_rank == 0 else part
    except (Changed, FileNotFoundError):
        error = CorruptSlot("the job wrote over this step while the command read it: try again", step=step)
    except MlflashError as problem:
        error = CorruptSlot(problem.message, node=world.node_name, step=step)
    parts = gather(world, part)
    world.raise_together(error)
    contents = Contents(sorted((shard for part in parts for shard in part.shards), key=lambda shard: shard.rank))
    for part in parts:
        contents.plain |= part.plain
        contents.provenance = contents.provenance or part.provenance
    seen = "committed" if attempt.committed else "no receipt of a commit"
    about = f"{seen}, {show_age(attempt.unix_ns)} ago; redundancy: {attempt.scheme}"
    return Checkpoint(step, attempt.world_size, "memory", about, attempt.missing, contents)


def _from_directory(world: World, directory: str | None, step: int, tensor: str | None) -> Checkpoint | None:
    stored = on_disk.look_into(world, directory)
    listed = next((listed for listed in stored.listed if listed.step == step), None) if stored is not None else None
    if stored is None or listed is None:
        return None
    path = f"{stored.path}/{listed.folder}"
    contents, error, provenance = Contents(), None, Provenance()
    if world.rank == 0:
        try:
            contents = _read_directory(stored.path, listed, tensor)
            provenance = on_disk.provenance_of(open_store(stored.path), listed)
        except OSError as problem:
            error = CorruptSlot(f"{path} cannot be read: {problem}", step=step)
        except CorruptSlot as problem:
            error = problem
    world.raise_together(error)
    about = f"{show_age(listed.card.unix_ns)} ago"
    return Checkpoint(step, listed.card.world_size, path, about, (), contents, provenance)


@dataclasses.dataclass
class Tensor:
    """The shards of one tensor: all have the same name, dtype and shape."""

    shards: list[Shard]

    @functools.cached_property
    def boxes(self) -> list[list[Shard]]:
        """The shards by their place in the tensor: those of a box are the same part of it."""
        boxes: dict[tuple[Any, ...], list[Shard]] = {}
        for shard in self.shards:
            boxes.setdefault((shard.entry.offset, shard.entry.shape), []).append(shard)
        return list(boxes.values())

    @property
    def nbytes(self) -> int:
        return sum(box[0].entry.nbytes for box in self.boxes)

    @property
    def differs(self) -> bool:
        return any(len({shard.numbers.check for shard in box if shard.numbers}) > 1 for box in self.boxes)

    @property
    def statistics(self) -> Statistics | None:
        """The statistics of the whole tensor. None if they are unknown, or ranks hold different bytes."""
        joined = Statistics()
        for box in self.boxes:
            numbers = next((shard.numbers for shard in box if shard.numbers is not None), None)
            if numbers is None or self.differs:
                return None
            joined.join(numbers)
        return joined

    @property
    def held(self) -> str:
        ranks = named({shard.rank for shard in self.shards})
        whole = all(shard.entry.shape == shard.entry.global_shape for shard in self.shards)
        return f"whole, {ranks}" if whole else f"{len(self.boxes)} parts, {ranks}"

    def to_json(self) -> dict[str, Any]:
        first = self.shards[0].entry
        joined = {} if self.statistics is None else self.statistics.to_json()
        joined.pop("check", None)  # which is of the bytes of a shard
        shards = [{
            "rank": shard.rank, "offset": list(shard.entry.offset), "shape": list(shard.entry.shape),
            "nbytes": shard.entry.nbytes, "node": shard.node or None,
            "bytes": [dataclasses.asdict(run) for run in shard.runs],
            "statistics": None if shard.numbers is None else shard.numbers.to_json(),
        } for shard in self.shards]  # fmt: skip
        return {"name": first.name, "kind": first.kind, "dtype": first.dtype, "shape": list(first.global_shape),
                "nbytes": self.nbytes, "statistics": joined or None, "shards": shards}  # fmt: skip

    def show(self, console: Console) -> None:
        first = self.shards[0].entry
        console.print(f"\n{first.name}: {first.kind} {first.dtype} {_shape(first.global_shape)}, "
                      f"{show_bytes(self.nbytes)}, {self.held}", markup=False)  # fmt: skip
        table = new_table(">rank", "offset", "shape", ">size", "node", "file", ">byte")
        for shard in self.shards:
            begin = [str(shard.rank), _shape(shard.entry.offset), _shape(shard.entry.shape)]
            for run in shard.runs:
                at = f"{run.start:,}" if run.start >= 0 else "compressed"
                table.add_row(*begin, show_bytes(run.nbytes), shard.node or "-", run.file, at)
                begin = [""] * 3
            if not shard.runs:
                table.add_row(*begin, show_bytes(shard.entry.nbytes), shard.node, "parts on other nodes", "")
        console.print(table)
        table = new_table(">rank", ">min", ">max", ">mean", ">std", ">nan", ">inf", ">zeros", "checksum")
        for shard in self.shards:
            if shard.numbers is not None:
                table.add_row(str(shard.rank), *shard.numbers.cells(), f"{shard.numbers.check:016x}")
        if len(self.boxes) > 1 and (statistics := self.statistics) is not None:
            table.add_row("all", *statistics.cells(), "")
        console.print(table)
        if self.differs:
            console.print("ranks that hold the same part of this tensor hold different bytes", style="yellow")


@dataclasses.dataclass
class Checkpoint:
    """A checkpoint that is shown."""

    step: int
    ranks: int
    source: str  # "memory", or the path in the directory
    about: str
    missing: tuple[int, ...]
    contents: Contents
    provenance: Provenance | None = None

    @property
    def tensors(self) -> list[Tensor]:
        tensors: dict[tuple[Any, ...], Tensor] = {}
        for shard in self.contents.shards:
            key = shard.entry.name, shard.entry.kind, shard.entry.dtype, shard.entry.global_shape
            tensors.setdefault(key, Tensor([])).shards.append(shard)
        return list(tensors.values())

    def to_json(self) -> dict[str, Any]:
        provenance = (self.contents.provenance or None) if self.provenance is None else self.provenance.origin
        return {"step": self.step, "ranks": self.ranks, "source": self.source, "missing_ranks": list(self.missing),
                "tensors": [tensor.to_json() for tensor in self.tensors],
                "plain": {name: _plain(value) for name, value in self.contents.plain.items()},
                "provenance": provenance}  # fmt: skip

    def show(self, console: Console, closely: bool) -> None:
        """Print a line for each tensor. With ``closely`` print each of its shards."""
        console.print(f"step {self.step} of {many(self.ranks, 'rank')}, from {self.source}; {self.about}")
        for style, line in self._lines_of_provenance():
            console.print(line, style=style, markup=False, soft_wrap=True)
        if self.missing:
            console.print(f"no slot of {named(self.missing)} is on the nodes that were read", style="yellow")
        table = new_table("tensor", "dtype", "shape", ">size", "held")
        for tensor in self.tensors:
            if closely:
                tensor.show(console)
            first = tensor.shards[0].entry
            table.add_row(first.name, first.dtype, _shape(first.global_shape), show_bytes(tensor.nbytes), tensor.held)
        if table.row_count and not closely:
            console.print(table)
        for name, value in self.contents.plain.items():
            text = repr(value)
            console.print(f"{name} = {text if len(text) <= _LONGEST else text[:_LONGEST] + '...'}", markup=False)

    def _lines_of_provenance(self) -> list[tuple[str | None, str]]:
        if self.provenance is None:
            recorded = self.contents.provenance
            parts = [f"provenance: {versions_of(recorded)}", *_given(recorded)] if recorded else []
            return [(None, "; ".join(parts))] * bool(parts)
        document = self.provenance.document
        if document is None:
            return [("yellow", "its provenance cannot be used: `mlflash verify` says why")]
        signer = [] if self.provenance.signature == "none" else [f"signed by the key {document['signer']}"]
        more = "; ".join([*_given(document), *signer])
        return [(None, f"provenance: {describe(document)}"), *([(None, f"  {more}")] if more else [])]


def _given(provenance: Any) -> list[str]:
    return [json.dumps(provenance["given"], ensure_ascii=False)] if provenance["given"] else []


def _plain(value: Any) -> Any:
    """Return a plain leaf as a JSON value if there is one, else as its ``repr``."""
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    return value if type(value) is float and math.isfinite(value) else repr(value)


def _shape(numbers: Sequence[int]) -> str:
    return f"[{', '.join(map(str, numbers))}]"
