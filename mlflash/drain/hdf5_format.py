"""Pieces of tensors ↔ HDF5 files: one per rank, and a master whose virtual datasets show every tensor whole.

    rank-00003.h5     /tensors/<name>     a piece: its bytes as they were in the slot; tied tensors are hard links
                      /objects            everything else of the rank's state, as JSON
                      /mlflash/index      what mlflash restores from
    checkpoint.h5     /tensors/<name>     a whole tensor, put together from the ranks' files
                      /ranks/<rank>       external links to what each rank has: its own random generators, say
                      /mlflash/index      the files, their sizes and checksums

h5py lays the files out in memory, with room for the tensors, and never writes to the file system itself (`file_holes`).
A "/" in a name is "%2F" here, and "." alone "%2E".
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import h5py
import numpy as np

from ..errors import ConfigError, pip_install
from ..protect.rank_checkpoint import RankCheckpoint
from ..state.boxes import covers, cut
from ..state.leaves import TORCH_ITEM_NBYTES, Entry, Tree
from ..state.plain_values import decode_plain
from ..storage import dcp_plans
from ..storage.file_holes import FileWithHoles, Source
from .index import CARD_NBYTES, Card, RankFiles
from .rank_content import DrainInput, RankContent, Receipt, add_card, shown

MASTER = "checkpoint.h5"
_PLUGINS = {"zstd": "Zstd", "lz4": "LZ4", "blosc": "Blosc", "blosc2": "Blosc2", "bshuf": "Bitshuffle", "bzip2": "BZip2"}
_PACKED_NBYTES = 64 << 10  # smaller pieces are not compressed
_CHUNK_NBYTES = 1 << 20
_RUN_NBYTES = 32 << 20  # how much is compressed at a time

_TORCH = {
    "bool": "b1", "uint8": "u1", "int8": "i1", "int16": "<i2", "uint16": "<u2", "int32": "<i4", "uint32": "<u4",
    "int64": "<i8", "uint64": "<u8", "float16": "<f2", "float32": "<f4", "float64": "<f8", "complex64": "<c8",
    "complex128": "<c16",
}  # fmt: skip
# Bytes; positions of sign, exponent and its bits; of mantissa and its bits; bias of the exponent.
_FLOATS = {"bfloat16": (2, 15, 7, 8, 0, 7, 127), "float8_e5m2": (1, 7, 2, 5, 0, 2, 15)}
"""Floats that HDF5 can describe and h5py reads as what they are. Not float8_e4m3fn and the like: HDF5 takes the largest
exponent for infinities, where those have numbers up to 448."""


@dataclasses.dataclass(frozen=True)
class Form:
    """How the elements of an entry are stored."""

    dtype: Any
    shape: tuple[int, ...] = ()  # of one element; () but where an element is stored as bytes
    raw: bool = False  # whether a reader has to know what the bytes mean


def rank_file_name(rank: int) -> str:
    """``rank_file_name(3) == "rank-00003.h5"``."""
    return f"rank-{rank:05d}.h5"


def dataset_name(name: str) -> str:
    """The name of an entry as a name in HDF5."""
    escaped = name.replace("%", "%25").replace("/", "%2F").replace("\0", "%00")
    return {"": "%", ".": "%2E"}.get(escaped, escaped)


@functools.cache
def form_of(kind: str, dtype: str) -> Form:
    """How entries of a dtype are stored: as that dtype if HDF5 can describe it, otherwise as bytes."""
    if kind == "tensor":
        if dtype in _FLOATS:
            return Form(_float_type(*_FLOATS[dtype]))
        if dtype in _TORCH:
            return Form(h5py.h5t.py_create(np.dtype(_TORCH[dtype]), logical=True))
        nbytes = TORCH_ITEM_NBYTES[dtype]
        return Form(h5py.h5t.STD_U8LE, () if nbytes == 1 else (nbytes,), raw=True)
    known = np.dtype(dtype)
    if dtype == "|b1" or (known.kind in "iufc" and known.itemsize <= 16):
        return Form(h5py.h5t.py_create(known, logical=True))
    if known.kind == "S" and known.itemsize:
        return Form(h5py.h5t.py_create(known, logical=True))
    if known.kind in "mM":
        return Form(h5py.h5t.py_create(np.dtype(known.str[0] + "i8"), logical=True), raw=True)
    return Form(h5py.h5t.STD_U8LE, (known.itemsize,), raw=True)


def _float_type(nbytes: int, sign: int, exponent: int, exponent_bits: int, mantissa: int, mantissa_bits: int,
                bias: int) -> Any:  # fmt: skip
    kind = h5py.h5t.IEEE_F32LE.copy()
    kind.set_fields(sign, exponent, exponent_bits, mantissa, mantissa_bits)
    kind.set_size(nbytes)
    kind.set_ebias(bias)
    return kind


def tensors(pieces: Sequence[Entry], sources: Sequence[Source], ties: Mapping[str, str], objects: Any,
            compression: str = "") -> tuple[FileWithHoles, list[int | None]]:  # fmt: skip
    """Lay out a rank's file without index and card; also return where each piece begins, None if it is compressed."""
    skeleton = FileWithHoles()
    starts: list[int | None] = []
    with h5py.File(skeleton.file, "w", userblock_size=CARD_NBYTES) as file:
        group = file.create_group("tensors", track_order=True)
        for piece, source in zip(pieces, sources, strict=True):
            form = form_of(piece.kind, piece.dtype)
            if compression and piece.nbytes >= _PACKED_NBYTES:
                _packed(group, piece, form, compression, source())
                starts.append(None)
                continue
            dataset = _contiguous(group, dataset_name(piece.name), form.dtype, (*piece.shape, *form.shape))
            _describe_piece(dataset, piece, form)
            if dataset.id.get_storage_size() != piece.nbytes:
                raise AssertionError(f"HDF5 takes {dataset.id.get_storage_size()} bytes for {piece}")
            start = int(dataset.id.get_offset() or 0)
            starts.append(start)
            skeleton.place(start, piece.nbytes, source)
        for name, target in ties.items():
            group[dataset_name(name)] = group[dataset_name(target)]
        file["objects"] = json.dumps(objects)
    return skeleton, starts


def master(ranks: Mapping[int, Sequence[tuple[str, Entry, bool]]], ties: Mapping[str, str], objects: Any,
          about: Mapping[str, Any]) -> FileWithHoles:  # fmt: skip
    """Lay out the master file, without index and card."""
    skeleton = FileWithHoles()
    places: dict[str, list[tuple[int, Entry]]] = {}
    for rank, pieces in ranks.items():
        for name, piece, has_one_value in pieces:
            if has_one_value:
                places.setdefault(name, []).append((rank, piece))
    # Virtual datasets need the newer format, which HDF5 1.10 reads.
    with h5py.File(skeleton.file, "w", userblock_size=CARD_NBYTES, libver=("v110", "v110")) as file:
        file.attrs.update(about)
        group = file.create_group("tensors", track_order=True)
        for name, parts in places.items():
            boxes = list({(part.offset, part.shape) for _, part in parts})
            if covers(parts[0][1].global_shape, boxes):  # what no file has would be read as zeros
                _virtual(group, name, parts)
        for name, target in ties.items():
            if dataset_name(target) in group:
                group[dataset_name(name)] = group[dataset_name(target)]
        links = file.create_group("ranks")
        for rank in ranks:
            links[f"{rank:05d}"] = h5py.ExternalLink(rank_file_name(rank), "/tensors")
        file["objects"] = json.dumps(objects)
    return skeleton


def add_index(skeleton: FileWithHoles, text: bytes) -> int:
    """Add the index, as the last dataset; returns where it begins in the file."""
    with h5py.File(skeleton.file, "r+") as file:
        dataset = _contiguous(file.create_group("mlflash"), "index", h5py.h5t.STD_U8LE, (len(text),))
        start = int(dataset.id.get_offset())
    skeleton.place(start, len(text), lambda: np.frombuffer(text, dtype=np.uint8), is_tensor=False)
    return start


def _contiguous(group: Any, name: str, dtype: Any, shape: tuple[int, ...]) -> Any:
    form = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    form.set_layout(h5py.h5d.CONTIGUOUS)
    form.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    form.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    space = h5py.h5s.create_simple(shape) if shape else h5py.h5s.create(h5py.h5s.SCALAR)
    return h5py.Dataset(h5py.h5d.create(group.id, name.encode(), dtype, space, form))


def _packed(group: Any, piece: Entry, form: Form, compression: str, raw: np.ndarray) -> None:
    shape = (*piece.shape, *form.shape)
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_chunk(next(part for _, part in cut(shape, form.dtype.get_size(), _CHUNK_NBYTES)))
    if compression == "gzip":
        properties.set_shuffle()
        properties.set_deflate(4)
    else:
        options = getattr(plugin(), _PLUGINS[compression])()
        properties.set_filter(options["compression"], h5py.h5z.FLAG_MANDATORY, tuple(options["compression_opts"]))
    name, space = dataset_name(piece.name).encode(), h5py.h5s.create_simple(shape)
    dataset = h5py.Dataset(h5py.h5d.create(group.id, name, form.dtype, space, properties))
    _describe_piece(dataset, piece, form)
    row = raw.nbytes // shape[0]
    rows = max(1, _RUN_NBYTES // row)
    for first in range(0, shape[0], rows):  # other threads can take h5py's lock between two reads
        last = min(shape[0], first + rows)
        in_file, in_memory = _rows(dataset, first, last)
        dataset.id.write(in_memory, in_file, np.ascontiguousarray(raw[first * row : last * row]), dataset.id.get_type())


def read_rows(dataset: Any, first: int, last: int, nbytes: int) -> np.ndarray:
    """Read rows of a dataset as the bytes that were in the slot, ``(nbytes,)`` uint8."""
    raw = np.empty(nbytes, dtype=np.uint8)
    in_file, in_memory = _rows(dataset, first, last)
    # In the type of the file, so that HDF5 converts nothing.
    dataset.id.read(in_memory, in_file, raw, dataset.id.get_type())
    return raw


def _rows(dataset: Any, first: int, last: int) -> tuple[Any, Any]:
    shape = (last - first, *dataset.shape[1:])
    in_file = dataset.id.get_space()
    in_file.select_hyperslab((first, *(0,) * (len(shape) - 1)), shape)
    return in_file, h5py.h5s.create_simple(shape)


def open_file(file: Any) -> Any:
    """Open an HDF5 file for reading, whatever compression it uses."""
    with contextlib.suppress(ConfigError):
        plugin()
    return h5py.File(file, "r")


def missing_filters(file: Any) -> list[str]:
    """The names of the compressions of an open file that this process cannot read."""
    missing: dict[str, None] = {}

    def note_missing(name: str, dataset: Any) -> None:
        if isinstance(dataset, h5py.Dataset):
            made = dataset.id.get_create_plist()
            for number in range(made.get_nfilters()):
                code, _, _, called = made.get_filter(number)
                if not h5py.h5z.filter_avail(code):
                    missing[called.decode(errors="replace") or str(code)] = None

    file.visititems(note_missing)
    return [*missing]


def plugin() -> Any:
    """Load hdf5plugin, which registers its compressions with HDF5. Raises ConfigError if it is not installed."""
    try:
        import hdf5plugin
    except ImportError:
        raise ConfigError(f"this compression needs hdf5plugin: {pip_install('compression')}") from None
    return hdf5plugin


def _describe_piece(dataset: Any, piece: Entry, form: Form) -> None:
    _describe(dataset, piece, form)
    dataset.attrs["offset"] = np.array(piece.offset, dtype=np.int64)


def _describe(dataset: Any, entry: Entry, form: Form) -> None:
    dataset.attrs["dtype"] = entry.dtype
    dataset.attrs["global_shape"] = np.array(entry.global_shape, dtype=np.int64)
    if form.raw:
        dataset.attrs["raw"] = "HDF5 has no type for this dtype: its elements as integers"


def _virtual(group: Any, name: str, parts: Sequence[tuple[int, Entry]]) -> None:
    first = parts[0][1]
    form = form_of(first.kind, first.dtype)
    shape = (*first.global_shape, *form.shape)
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    space = h5py.h5s.create_simple(shape) if shape else h5py.h5s.create(h5py.h5s.SCALAR)
    if first.nbytes or any(part.nbytes for _, part in parts):
        properties.set_layout(h5py.h5d.VIRTUAL)
        for rank, part in {(part.offset, part.shape): (rank, part) for rank, part in reversed(parts)}.values():
            if part.nbytes:
                target = space.copy()
                part_shape = (*part.shape, *form.shape)
                source = h5py.h5s.create_simple(part_shape) if part_shape else h5py.h5s.create(h5py.h5s.SCALAR)
                if shape:
                    target.select_hyperslab((*part.offset, *(0,) * len(form.shape)), part_shape)
                inside = f"/tensors/{dataset_name(part.name)}".replace("%", "%%")  # "%b" would be the number of a block
                properties.set_virtual(target, rank_file_name(rank).encode(), inside.encode(), source)
    dataset = h5py.Dataset(h5py.h5d.create(group.id, dataset_name(name).encode(), form.dtype, space, properties))
    _describe(dataset, first, form)


def readable(tree: Tree, names: Sequence[str], plain: Sequence[Any]) -> Any:
    """What a state holds besides tensors, as JSON for people: {"$tensor": name} stands for a tensor.

    What JSON cannot represent becomes a string; the exact values are in the index.
    """
    tag, rest = tree[0], tree[1]
    if tag == "e":
        return {"$tensor": names[rest]}
    if tag == "p":
        value = decode_plain(plain[rest])
        known = value is None or isinstance(value, (bool, str)) or type(value) is int
        finite = isinstance(value, float) and value == value and abs(value) != float("inf")
        return value if known or finite else repr(value)
    if tag in ("o", "k"):
        return readable(rest, names, plain)
    if tag == "d":
        return {str(decode_plain(key)): readable(sub, names, plain) for key, sub in rest}
    return [readable(sub, names, plain) for sub in rest]


# What a rank writes, and what commits a checkpoint → HDF5 files, each of which begins with its card.


class Hdf5:
    """HDF5, with a compression of `config.COMPRESSIONS`, or ""."""

    name = "hdf5"
    most_pieces: float = 1_000_000  # takes rank 0 a minute and 2 GB

    def __init__(self, compression: str):
        self._compression = compression

    def rank_files(self, drain_input: DrainInput, rank: int, content: RankContent, owner: str
                   ) -> tuple[list[tuple[str, FileWithHoles]], Receipt]:  # fmt: skip
        name = rank_file_name(rank)
        names_here = {part.entry.name for part in content.parts}
        objects, names = _objects(content.home)
        ties = {name: first for name, first in content.ties.items() if first in names_here}
        entries = [part.entry for part in content.parts]
        skeleton, starts = tensors(entries, content.sources, ties, objects, self._compression)
        places = content.places(name, starts)
        text, first_nbytes = content.index(places)
        card = _finish(skeleton, drain_input, rank, owner, text)
        rank_files = RankFiles.of(name, card, name, card.file_nbytes, text[:first_nbytes])
        pieces = [(part.entry, part.common >= 0, places.check(place))
                  for part, place in zip(content.parts, places.of.values(), strict=True)]  # fmt: skip
        receipt = Receipt(rank, rank_files, pieces, content.ties, objects if names or rank == 0 else None, names)
        return [(name, skeleton)], receipt

    def master_files(
        self, drain_input: DrainInput, text: bytes, receipts: Sequence[Receipt], job: str, owner: str
    ) -> list[tuple[str, FileWithHoles]]:
        about: dict[str, Any] = {
            "step": drain_input.step,
            "world_size": drain_input.world_size,
            "job": job,
            "by": "mlflash",
        }
        planned = [receipt.objects for receipt in reversed(receipts) if receipt.names]
        objects = {key: value for part in planned for key, value in part.items()}
        skeleton = master(shown(receipts), receipts[0].ties, objects or receipts[0].objects, about)
        _finish(skeleton, drain_input, -1, owner, text)
        return [(MASTER, skeleton)]


def _objects(home: RankCheckpoint) -> tuple[Any, dict[str, str]]:
    """What a rank's state holds besides tensors, for people; and the names of tensors that differ in a DCP plan."""
    manifest = home.manifest
    if not dcp_plans.is_planned(manifest.tree):
        return readable(manifest.tree, [entry.name for entry in manifest.entries], manifest.plain), {}
    index, blob = (home.reader()(entry).tobytes() for entry in manifest.entries[:2])
    values = dcp_plans.values(dcp_plans.Index.decode(index), blob)
    objects = {name: readable(tree, (), plain) for name, (tree, plain) in values.items()}
    return objects, dcp_plans.names_of(manifest.tree, manifest.entries)


def _finish(skeleton: FileWithHoles, drain_input: DrainInput, rank: int, owner: str, text: bytes) -> Card:
    start = add_index(skeleton, text)
    return add_card(skeleton, drain_input, rank, owner, start, text)
