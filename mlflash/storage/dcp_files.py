"""A directory that plain ``torch.distributed.checkpoint.load`` reads.

Each ``__{rank}_{n}.distcp`` holds tensors (or parts of them) and objects, each as a `torch.save` file of its own, one
after the other. ``.metadata`` says where each is, and is written last: without it there is no checkpoint.

Source: torch.distributed.checkpoint.filesystem.FileSystemWriter.
"""

from __future__ import annotations

import dataclasses
import io
import math
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..errors import StateError, StructureMismatch
from ..state.leaves import Entry, Tree, inside
from ..state.paths import unique
from ..state.plain_values import decode_plain
from . import torch_pickles
from .file_holes import FileWithHoles, Source
from .torch_pickles import Call, Global, Instance, archive, around_tensor, size
from .whole_state import tensor_dtype

METADATA = ".metadata"
_VERSION = "1.0.0"  # torch.distributed.checkpoint.filesystem.CURRENT_DCP_VERSION

_METADATA = "torch.distributed.checkpoint.metadata"  # the module

Place = tuple[int, int]
"""Where something begins in a file, and its bytes."""
_Index = tuple[str, tuple[int, ...] | None]  # a key, and the offset of a chunk; None: an object
_Info = tuple[str, int, int]  # the name of a file, and a place in it


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
    frames = [around_tensor(tensor_dtype(piece), piece.shape) for piece in pieces]
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


def pickled(value: Any, has_tensors: bool = True) -> bytes:
    """An object as DCP stores it. Without tensors in it, PyTorch is not needed."""
    if not has_tensors:
        return archive(pickle.dumps(value, 2))
    import torch

    raw = io.BytesIO()
    torch.save(value, raw)
    return raw.getvalue()


def metadata(files: Iterable[Contents], paths: Mapping[str, Path], ties: Mapping[str, str] | None = None,
             save_id: str | None = None, left_out: dict[str, str] | None = None) -> bytes:  # fmt: skip
    """Merge what all files hold into ``.metadata``.

    If pieces are the same part of a tensor, or objects have the same key, the first one counts.

    Args:
        files: of all ranks, in the same order wherever this is called.
        paths: where each key is in the nested state, see `keys_of`; a key without a path gets no entry.
        ties: key → the key that has the same bytes, and is in the files.
        left_out: gets what DCP cannot hold, with the reason, instead of an error: DCP has one tensor of a name, and
            ranks may have different ones.

    Raises:
        StructureMismatch: a key is in no file, or the parts of a tensor do not cover it exactly once, or belong to
            different tensors.
    """
    tensors: dict[str, _Tensor] = {}
    stored: dict[_Index, tuple[int | None, _Info]] = {}  # the number of each chunk, and where it is
    wanted = {*paths, *(ties or {}).values()}
    for file in files:
        places = iter(file.places)
        for piece, place in zip(file.pieces, places, strict=False):
            if piece.name in wanted:
                try:
                    _add_piece(piece, (file.name, *place), tensors, stored)
                except StructureMismatch as error:
                    if left_out is None:
                        raise
                    left_out[piece.name] = error.message
        for key, place in zip(file.extras, places, strict=True):
            if key not in tensors:
                stored.setdefault((key, None), (None, (file.name, *place)))
    for key, tensor in list(tensors.items()):
        count, held = math.prod(tensor.size), sum(math.prod(shape) for _, shape in tensor.chunks)
        if held != count and left_out is not None:
            left_out[key] = "ranks have parts of different tensors under this name"
            del tensors[key]
        elif held != count:
            raise StructureMismatch("the files do not hold each element of this tensor once", tensor=key,
                                    expected=f"{count} elements", found=held)  # fmt: skip
    for key, other in (ties or {}).items():
        if left_out is not None and other in left_out and other not in tensors:
            left_out[key] = left_out[other]
            continue
        tensors[key] = tensors[other]
        for number, (offset, _) in enumerate(tensors[other].chunks):
            stored[key, offset] = number, stored[other, offset][1]
    stored = {index: place for index, place in stored.items() if index[1] is None or index[0] in tensors}
    missing = [key for key in paths if key not in tensors and (key, None) not in stored]
    if unknown := [key for key in missing if key not in (left_out or ())]:
        raise StructureMismatch("no file holds this part of the state", tensor=unknown[0])
    paths = {key: path for key, path in paths.items() if key not in missing}
    about: dict[str, Any] = {"checkpoint_id": None, "save_id": save_id, "load_id": None, "modules": []}
    return torch_pickles.pickled(_instance("Metadata", {
        "state_dict_metadata": {
            key: tensors[key].described() if key in tensors else _instance("BytesStorageMetadata") for key in paths
        },
        "planner_data": dict(paths),
        "storage_data": {_index(*key, number): _info(*place) for key, (number, place) in stored.items()},
        "storage_meta": _instance("StorageMeta", about),
        "version": _VERSION,
    }))  # fmt: skip


@dataclasses.dataclass
class _Tensor:
    """What is known of a tensor: its chunks, each an offset and a shape."""

    dtype: str
    size: tuple[int, ...]
    chunks: list[tuple[tuple[int, ...], tuple[int, ...]]] = dataclasses.field(default_factory=list)

    def described(self) -> Instance:
        # PyTorch before 2.15 knows five properties of a tensor, not six, and cannot read more.
        layout = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))
        memory_format = Call(Global(_METADATA, "_MEM_FORMAT_ENCODING"), (0,))
        properties = (Global("torch", self.dtype), layout, False, memory_format, False)
        chunks = [_instance("ChunkStorageMetadata", {"offsets": size(offset), "sizes": size(shape)})
                  for offset, shape in self.chunks]  # fmt: skip
        return _instance("TensorStorageMetadata", {"properties": _instance("TensorProperties", properties),
                                                   "size": size(self.size), "chunks": chunks})  # fmt: skip


def _add_piece(piece: Entry, info: _Info, tensors: dict[str, _Tensor], stored: dict[_Index, tuple[int | None, _Info]]
               ) -> None:  # fmt: skip
    dtype = tensor_dtype(piece)
    if (piece.name, None) in stored:
        raise StructureMismatch("ranks have a tensor and something else under this name", tensor=piece.name)
    tensor = tensors.setdefault(piece.name, _Tensor(dtype, piece.global_shape))
    if (tensor.dtype, tensor.size) != (dtype, piece.global_shape):
        raise StructureMismatch("ranks have different tensors of this name", tensor=piece.name,
                                expected=f"{tensor.dtype} {tensor.size}",
                                found=f"{dtype} {piece.global_shape}")  # fmt: skip
    is_empty_part = 0 in piece.shape and 0 not in piece.global_shape
    if (piece.name, piece.offset) not in stored and not is_empty_part:
        stored[piece.name, piece.offset] = len(tensor.chunks), info
        tensor.chunks.append((piece.offset, piece.shape))


def _instance(name: str, state: Any = None) -> Instance:
    return Instance(Global(_METADATA, name), state)


def _index(name: str, offset: tuple[int, ...] | None, number: int | None) -> Instance:
    where = {} if offset is None else {"offset": size(offset)}
    return _instance("MetadataIndex", {"fqn": name, "index": number} | where)


def _info(file: str, start: int, nbytes: int) -> Instance:
    state = {"relative_path": file, "offset": start, "length": nbytes}
    return Instance(Global("torch.distributed.checkpoint.filesystem", "_StorageInfo"), state)


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


def keys_of(tree: Tree, entries: Sequence[Entry], root: str = "") -> Keys:
    """Give each leaf the key of ``dcp.save``, or an exact path, see `paths`.

    ``root``: the key of a state that is no dict; "": StateError is raised then.
    """
    if is_dict := inside(tree)[0] == "d":
        root = ""
    elif not root:
        raise StateError("a DCP checkpoint holds a dict: save the state as {'state': ...}")
    parts = list(_visit(tree, () if is_dict else (root,), entries, () if is_dict else (repr(root),)))
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
