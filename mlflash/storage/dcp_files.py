"""A directory that plain ``torch.distributed.checkpoint.load`` reads.

Each ``__{rank}_{n}.distcp`` holds tensors (or parts of them) and objects, each as a `torch.save` file of its own, one
after the other. ``.metadata`` says where each is, and is written last: without it there is no checkpoint.

`rank_file` and `metadata` are for writers on many ranks; `write` exports a whole checkpoint.

Source: torch.distributed.checkpoint.filesystem.FileSystemWriter.
"""

from __future__ import annotations

import dataclasses
import io
import math
import pickle
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from ..errors import StructureMismatch
from ..exports.formulas import Formula
from ..exports.mapping import plan
from ..exports.outputs import BATCH_NBYTES, Batches, Output
from ..exports.rules import Rule
from ..state.leaves import Entry, Tree, from_bytes
from ..state.plain_values import decode_plain
from .dcp_keys import Keys, Path, keys_of
from .file_holes import Skeleton, Source
from .store import Store
from .torch_files import around
from .whole_state import Whole, Written, build, tensor_dtype

METADATA = ".metadata"
FILE_NBYTES = 4 << 30
_VERSION = "1.0.0"  # torch.distributed.checkpoint.filesystem.CURRENT_DCP_VERSION
_CHUNK_NBYTES = 64 << 20

Place = tuple[int, int]
"""Where something begins in a file, and its bytes."""


@dataclasses.dataclass(frozen=True)
class Contents:
    """What a ``.distcp`` file holds.

    Attributes:
        name: of the file.
        pieces: tensors, or parts of them.
        extras: keys of the objects.
        places: of the pieces, then of the extras, as `rank_file` gave them.
    """

    name: str
    pieces: Sequence[Entry]
    extras: Sequence[str]
    places: Sequence[Place]


def rank_file(
    pieces: Sequence[Entry], sources: Sequence[Source], extras: Mapping[str, bytes]
) -> tuple[Skeleton, list[Place], list[int]]:
    """Put a ``.distcp`` file together.

    Not collective. The sources are called when the file is streamed. The caller closes the skeleton.

    Args:
        pieces: tensors, or parts of them. An array becomes a tensor, which ``dcp.load`` does not load into an array:
            what is to stay an array belongs to the extras.
        sources: what gives the bytes of each.
        extras: objects, as `pickled` makes them, by key.

    Returns:
        The file; the place of each piece and then of each extra, for `Contents`; where the bytes of each piece begin.

    Raises:
        StateError: an array has no torch dtype.
    """
    frames = [around(tensor_dtype(piece), piece.shape) for piece in pieces]
    skeleton = Skeleton()
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
    """An object as DCP stores it. Not collective."""
    raw = io.BytesIO()
    torch.save(value, raw)
    return raw.getvalue()


def metadata(files: Iterable[Contents], paths: Mapping[str, Path], ties: Mapping[str, str] | None = None,
             save_id: str | None = None) -> bytes:  # fmt: skip
    """Merge what all files hold into ``.metadata``.

    Not collective. Of pieces that are the same part of a tensor, and of objects of the same key, the first counts.

    Args:
        files: of all ranks, in the same order wherever this is called.
        paths: where each key is in the nested state, see `keys_of`; of a key that is not among them nothing is said.
        ties: key → the key that has the same bytes, and is in the files.
        save_id: what tells this save from others.

    Raises:
        StructureMismatch: a key is in no file, the parts of a tensor are not all of it, each once, or are of different
            tensors.
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
    return pickle.dumps(dcp.Metadata({key: described[key] for key in paths}, dict(paths), stored, about, _VERSION))


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


def write(whole: Whole, store: Store, rules: Sequence[Rule] = (), file_nbytes: int = FILE_NBYTES) -> Written:
    """Write a checkpoint as a DCP checkpoint of one rank.

    Collective where reading the checkpoint is. Tied tensors are stored once and found under each of their keys. Objects
    (numbers, strings, arrays, tuples) are pickled, as DCP does.

    Args:
        whole: the checkpoint.
        store: where the files go.
        rules: what becomes of the tensors on the way; with rules the checkpoint is a dict of tensors by name.
        file_nbytes: most bytes of tensors in a file; a larger tensor has a file of its own.

    Raises:
        StateError: the state is no dict, two leaves get the same key, or torch cannot load a dtype.
        ConfigError: a rule does not fit.
    """
    entries = list(whole.entries.values())
    outputs, keys = _planned(whole, rules)
    first: dict[Formula, str] = {}
    ties = {key: other for key, output in outputs.items() if (other := first.setdefault(output.formula, key)) != key}
    own = {key: output for key, output in outputs.items() if key not in ties}
    for output in own.values():
        tensor_dtype(output.entry)  # refuses before anything is written
    batches = Batches(whole, list(own.values()))
    files, written = [], {}
    for number, (tensors, objects) in enumerate(_cut(entries, own, keys.objects, file_nbytes)):
        pieces = [dataclasses.replace(own[key].entry, name=key) for key in tensors]
        sources = [batches.source(own[key]) for key in tensors]
        extras = {key: pickled(_object(whole, entries, keys.objects[key])) for key in objects}
        skeleton, places, _ = rank_file(pieces, sources, extras)
        name = f"__0_{number}.distcp"
        try:
            written[name] = store.write(name, skeleton.stream(_CHUNK_NBYTES))
        finally:
            skeleton.close()
        files.append(Contents(name, pieces, list(extras), places))
    written[METADATA] = store.write(METADATA, [metadata(files, keys.paths, ties)])
    return Written(written, len(own), ties)


def _planned(whole: Whole, rules: Sequence[Rule]) -> tuple[dict[str, Output], Keys]:
    """The tensors that go out, by key, and all keys."""
    outputs = plan(whole.entries, rules, whole.ties)
    if rules:
        named = {output.entry.name: output for output in outputs}
        return named, Keys({}, {}, {name: (name,) for name in named})
    keys = keys_of(whole.tree, list(whole.entries.values()))
    return {key: outputs[number] for key, number in keys.tensors.items()}, keys


def _cut(
    entries: Sequence[Entry], tensors: Mapping[str, Output], objects: Mapping[str, Tree], file_nbytes: int
) -> list[tuple[list[str], list[str]]]:
    """Which tensors and objects are in which file. Objects are in memory while their file is written."""
    sizes = [(key, True, output.entry.nbytes) for key, output in tensors.items()]
    sizes += [(key, False, sum(entry.nbytes for entry in _inside(entries, tree))) for key, tree in objects.items()]
    files: list[tuple[list[str], list[str]]] = [([], [])]
    nbytes = held = 0
    for key, is_tensor, more in sizes:
        if nbytes and (nbytes + more > file_nbytes or (not is_tensor and held + more > BATCH_NBYTES)):
            files.append(([], []))
            nbytes = held = 0
        files[-1][not is_tensor].append(key)
        nbytes, held = nbytes + more, held + (0 if is_tensor else more)
    return files


def _inside(entries: Sequence[Entry], tree: Tree) -> list[Entry]:
    """The tensors and arrays in a part of the state."""
    found: list[Entry] = []
    build(tree, lambda number: found.append(entries[number]), lambda _: None)
    return found


def _object(whole: Whole, entries: Sequence[Entry], tree: Tree) -> Any:
    """A part of the state, with what is in it."""
    names = [entry.name for entry in _inside(entries, tree)]
    raw = whole.bytes_of(names) if names else {}
    return build(tree, lambda number: from_bytes(entries[number], np.array(raw[entries[number].name])),
                 lambda number: decode_plain(whole.plain[number]))  # fmt: skip
