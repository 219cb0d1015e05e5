"""A directory that plain ``torch.distributed.checkpoint.load`` reads.

Each ``__{rank}_{n}.distcp`` holds tensors (or parts of them) and objects, each as a `torch.save` file of its own, one
after the other. ``.metadata`` says where each is, and is written last: without it there is no checkpoint.

Source: torch.distributed.checkpoint.filesystem.FileSystemWriter.
"""

from __future__ import annotations

import copyreg
import dataclasses
import functools
import io
import math
import mmap
import os
import pickle
import struct
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from ..errors import StateError, StructureMismatch
from ..state.leaves import Entry, Tree, inside
from ..state.paths import unique
from ..state.plain_values import decode_plain
from .file_holes import FileWithHoles, Source
from .whole_state import tensor_dtype

METADATA = ".metadata"
_VERSION = "1.0.0"  # torch.distributed.checkpoint.filesystem.CURRENT_DCP_VERSION

Place = tuple[int, int]
"""Where something begins in a file, and its bytes."""


@dataclasses.dataclass(frozen=True)
class Contents:
    """What a ``.distcp`` file holds."""

    name: str
    pieces: Sequence[Entry]  # tensors, or parts of them
    extras: Sequence[str]
    places: Sequence[Place]  # of the pieces, then of the extras, as `rank_file` returned them


def rank_file(
    pieces: Sequence[Entry], sources: Sequence[Source], extras: Mapping[str, bytes]
) -> tuple[FileWithHoles, list[Place], list[int]]:
    """Put a ``.distcp`` file together.

    The sources are called when the file is streamed. The caller closes the skeleton.

    Args:
        pieces: tensors, or parts of them. An array becomes a tensor, which ``dcp.load`` does not load into an array: if
            it must stay an array, it belongs to the extras.

    Returns:
        The file; the place of each piece and then of each extra, for `Contents`; where the bytes of each piece begin.

    Raises:
        StateError: an array has no torch dtype.
    """
    frames = [around(tensor_dtype(piece), piece.shape) for piece in pieces]
    skeleton = FileWithHoles()
    places, starts, at = [], [], 0
    for piece, source, (before, after) in zip(pieces, sources, frames, strict=True):
        start = at + len(before)
        skeleton.patch(at, before)
        skeleton.place(start, piece.nbytes, source)
        skeleton.patch(start + piece.nbytes, after)
        end = start + piece.nbytes + len(after)
        places.append((at, end - at))
        starts.append(start)
        at = end
    for raw in extras.values():
        skeleton.patch(at, raw)
        places.append((at, len(raw)))
        at += len(raw)
    return skeleton, places, starts


def pickled(value: Any) -> bytes:
    """An object as DCP stores it."""
    raw = io.BytesIO()
    torch.save(value, raw)
    return raw.getvalue()


def metadata(files: Iterable[Contents], paths: Mapping[str, Path], ties: Mapping[str, str] | None = None,
             save_id: str | None = None) -> bytes:  # fmt: skip
    """Merge what all files hold into ``.metadata``.

    If pieces are the same part of a tensor, or objects have the same key, the first one counts.

    Args:
        files: of all ranks, in the same order wherever this is called.
        paths: where each key is in the nested state, see `keys_of`; a key without a path gets no entry.
        ties: key → the key that has the same bytes, and is in the files.

    Raises:
        StructureMismatch: a key is in no file, or the parts of a tensor do not cover it exactly once, or belong to
            different tensors.
    """
    described: dict[str, Any] = {}
    stored: dict[Any, _StorageInfo] = {}
    wanted = {*paths, *(ties or {}).values()}
    for file in files:
        places = iter(file.places)
        for piece, place in zip(file.pieces, places, strict=False):
            if piece.name in wanted:
                _add_piece(piece, _StorageInfo(file.name, *place), described, stored)
        for key, place in zip(file.extras, places, strict=True):
            if key not in described:
                described[key] = dcp.BytesStorageMetadata()
                stored[dcp.MetadataIndex(key)] = _StorageInfo(file.name, *place)
    for key, tensor in described.items():
        if isinstance(tensor, dcp.TensorStorageMetadata):
            held, count = sum(math.prod(chunk.sizes) for chunk in tensor.chunks), math.prod(tuple(tensor.size))
            if held != count:
                raise StructureMismatch("the files do not hold each element of this tensor once", tensor=key,
                                        expected=f"{count} elements", found=held)  # fmt: skip
    for key, other in (ties or {}).items():
        described[key] = described[other]
        for number, chunk in enumerate(described[other].chunks):
            index = dcp.MetadataIndex(other, chunk.offsets)
            stored[dcp.MetadataIndex(key, chunk.offsets, number)] = stored[index]
    if missing := [key for key in paths if key not in described]:
        raise StructureMismatch("no file holds this part of the state", tensor=missing[0])
    about = dcp.StorageMeta(save_id=save_id)
    raw = io.BytesIO()
    _Pickler(raw).dump(dcp.Metadata({key: described[key] for key in paths}, dict(paths), stored, about, _VERSION))
    return raw.getvalue()


class _Pickler(pickle.Pickler):
    """Writes a ``.metadata`` that PyTorch before 2.15 can read, too: it knows five properties of a tensor, not six."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, dcp.TensorProperties):
            return copyreg.__newobj__, (dcp.TensorProperties,), value.__getstate__()[:5]  # type: ignore[attr-defined]
        return NotImplemented


def _add_piece(piece: Entry, info: _StorageInfo, described: dict[str, Any], stored: dict[Any, _StorageInfo]) -> None:
    dtype, size = getattr(torch, tensor_dtype(piece)), torch.Size(piece.global_shape)
    if piece.name not in described:
        described[piece.name] = dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=dtype), size, [])
    tensor = described[piece.name]
    if (tensor.properties.dtype, tensor.size) != (dtype, size):
        raise StructureMismatch("ranks have different tensors of this name", tensor=piece.name,
                                expected=f"{tensor.properties.dtype} {tuple(tensor.size)}",
                                found=f"{dtype} {tuple(size)}")  # fmt: skip
    index = dcp.MetadataIndex(piece.name, piece.offset, len(tensor.chunks))
    is_empty_part = 0 in piece.shape and 0 not in piece.global_shape
    if index not in stored and not is_empty_part:
        tensor.chunks.append(dcp.ChunkStorageMetadata(torch.Size(piece.offset), torch.Size(piece.shape)))
        stored[index] = info


# What ``torch.save`` writes around tensors


_LOCAL_HEADER = struct.Struct("<26xHH")  # of a zip record; it ends with the lengths of name and extra field


def hollow(dtypes_and_shapes: Sequence[tuple[str, tuple[int, ...]]]) -> list[torch.Tensor]:
    """Make tensors without memory; each has a storage of its own. They must never be read or written."""
    sizes = [math.prod(shape) * getattr(torch, dtype).itemsize for dtype, shape in dtypes_and_shapes]
    starts = [0]
    for nbytes in sizes:
        starts.append(starts[-1] + -(-nbytes // 64) * 64)
    ground = _ground(starts[-1])
    return [
        (torch.from_numpy(ground[start : start + nbytes]) if nbytes else torch.empty(0, dtype=torch.uint8))
        .view(getattr(torch, dtype))
        .view(shape)
        for (dtype, shape), start, nbytes in zip(dtypes_and_shapes, starts, sizes, strict=False)
    ]


def _ground(nbytes: int) -> np.ndarray:
    """Addresses only: a mapped hole never counts as memory, even if the kernel does not overcommit."""
    fd = os.memfd_create("mlflash-ground", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, max(1, nbytes))
        return np.frombuffer(mmap.mmap(fd, max(1, nbytes)), dtype=np.uint8)
    finally:
        os.close(fd)


def save(value: Any, skeleton: FileWithHoles) -> list[int]:
    """Write a value of hollow tensors as ``torch.save`` does; return where the bytes of each storage go, in order."""
    with torch.serialization.skip_data():
        torch.save(value, skeleton.file)
    starts = {}
    with zipfile.ZipFile(skeleton.file) as archive:
        for record in archive.infolist():
            folder, _, number = record.filename.rpartition("/")
            if folder.endswith("/data"):
                header = os.pread(skeleton.file.fileno(), _LOCAL_HEADER.size, record.header_offset)
                starts[int(number)] = record.header_offset + _LOCAL_HEADER.size + sum(_LOCAL_HEADER.unpack(header))
    return [starts[number] for number in range(len(starts))]


@functools.lru_cache(maxsize=4096)
def around(dtype: str, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """What ``torch.save`` of one tensor writes before its bytes, and after them."""
    (tensor,) = hollow([(dtype, shape)])
    skeleton = FileWithHoles()
    try:
        (start,) = save(tensor, skeleton)
        fd, end = skeleton.file.fileno(), start + tensor.nbytes
        return os.pread(fd, start, 0), os.pread(fd, skeleton.nbytes - end, end)
    finally:
        skeleton.close()


# Keys: DCP looks into dicts, and into lists that hold tensors or dicts; each tensor has a key of its own. Everything
# else is an object: one pickle, whatever is in it. So are arrays, and tuples even where tensors are in them. An empty
# dict is lost. Source: torch.distributed.checkpoint._nested_dict, since PyTorch 2.4.


Path = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True)
class Keys:
    """How a state is arranged in a DCP checkpoint."""

    tensors: dict[str, int] = dataclasses.field(default_factory=dict)  # key → number of the entry
    # key → the part of the state that is pickled as one
    objects: dict[str, Tree] = dataclasses.field(default_factory=dict)
    paths: dict[str, Path] = dataclasses.field(default_factory=dict)  # key → where it is in the nested state


def keys_of(tree: Tree, entries: Sequence[Entry]) -> Keys:
    """Give each leaf the key of ``dcp.save``, or an exact path, see `paths`. Raises StateError without a dict."""
    if inside(tree)[0] != "d":
        raise StateError("a DCP checkpoint holds a dict: save the state as {'state': ...}")
    parts = list(_visit(tree, (), entries))
    names = unique([(".".join(map(str, path)), ".".join(exact)) for path, exact, _ in parts])
    keys = Keys()
    for key, (path, _, part) in zip(names, parts, strict=True):
        keys.paths[key] = path
        if _is_tensor(node := inside(part), entries):
            keys.tensors[key] = node[1]
        else:
            keys.objects[key] = part
    return keys


def _visit(tree: Tree, path: Path, entries: Sequence[Entry], exact: tuple[str, ...] = ()
           ) -> Iterator[tuple[Path, tuple[str, ...], Tree]]:  # fmt: skip
    """Each part of the state that gets a key, and where it is."""
    tag, rest = inside(tree)
    if tag == "d":
        for code, sub in rest:
            key = decode_plain(code)
            yield from _visit(sub, (*path, str(key)), entries, (*exact, repr(key)))
    elif tag == "l" and _is_open(inside(tree), entries):
        for number, sub in enumerate(rest):
            yield from _visit(sub, (*path, number), entries, (*exact, str(number)))
    else:
        yield path, exact, tree


def _is_tensor(tree: Tree, entries: Sequence[Entry]) -> bool:
    return tree[0] == "e" and entries[tree[1]].kind == "tensor"


def _is_open(tree: Tree, entries: Sequence[Entry]) -> bool:
    """Whether DCP looks into a list."""
    items = [inside(item) for item in tree[1]]
    return any(item[0] == "d" or _is_tensor(item, entries) or (item[0] == "l" and _is_open(item, entries))
               for item in items)  # fmt: skip
