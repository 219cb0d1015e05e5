"""A directory that plain ``torch.distributed.checkpoint.load`` reads.

Each ``__{rank}_{n}.distcp`` holds tensors (or parts of them) and objects, each as a `torch.save` file of its own, one
after the other. ``.metadata`` says where each is, and is written last: without it there is no checkpoint.

Source: torch.distributed.checkpoint.filesystem.FileSystemWriter.
"""

from __future__ import annotations

import copyreg
import dataclasses
import io
import math
import pickle
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from ..errors import StructureMismatch
from ..state.leaves import Entry
from .dcp_keys import Path
from .file_holes import FileWithHoles, Source
from .torch_files import around
from .whole_state import tensor_dtype

METADATA = ".metadata"
_VERSION = "1.0.0"  # torch.distributed.checkpoint.filesystem.CURRENT_DCP_VERSION

Place = tuple[int, int]
"""Where something begins in a file, and its bytes."""


@dataclasses.dataclass(frozen=True)
class Contents:
    """What a ``.distcp`` file holds.

    Attributes:
        pieces: tensors, or parts of them.
        places: of the pieces, then of the extras, as `rank_file` returned them.
    """

    name: str
    pieces: Sequence[Entry]
    extras: Sequence[str]
    places: Sequence[Place]


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
        save_id: tells this save from others.

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
            found, count = sum(math.prod(chunk.sizes) for chunk in tensor.chunks), math.prod(tuple(tensor.size))
            if found != count:
                raise StructureMismatch("the files do not hold each element of this tensor once", tensor=key,
                                        expected=f"{count} elements", found=found)  # fmt: skip
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
