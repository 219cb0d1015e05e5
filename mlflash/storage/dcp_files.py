"""A directory that plain ``torch.distributed.checkpoint.load`` reads.

Each ``__{rank}_{n}.distcp`` holds tensors (or parts of them) and objects, each as a `torch.save` file of its own, one
after the other. ``.metadata`` says where each is, and is written last: without it there is no checkpoint.

Source: torch.distributed.checkpoint.filesystem.FileSystemWriter.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import itertools
import math
import os
import pickle
import struct
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..errors import StateError, StructureMismatch
from ..state.leaves import TORCH_ITEM_NBYTES, Entry, Tree, inside
from ..state.paths import unique
from ..state.plain_values import decode_plain
from .file_holes import FileWithHoles, Source
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
        return archive_of(pickle.dumps(value, 2))
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
    return pickle_of(_instance("Metadata", {
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


# Pickles of PyTorch's objects, and the archives of its tensors, made without PyTorch: a courier that imports it takes
# hundreds of MiB and seconds of a core, for a few names. A pickle only names classes and functions, and `torch.load`
# finds them when it reads it. Source: the protocol 2 of Python's pickletools, and what `torch.save` of PyTorch 2.13
# writes.


_STORAGES = {
    "float32": "FloatStorage", "float64": "DoubleStorage", "float16": "HalfStorage", "bfloat16": "BFloat16Storage",
    "int8": "CharStorage", "uint8": "ByteStorage", "int16": "ShortStorage", "int32": "IntStorage",
    "int64": "LongStorage", "bool": "BoolStorage", "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
}  # fmt: skip
"""The class of the storage of each dtype; tensors of other dtypes have an untyped storage, and name their dtype."""
_ALIGNMENT = 64  # of a tensor's bytes in its archive
_PADDING = struct.Struct("<2sH")  # the head of the extra field that pads a record, as PyTorch's has it
_LARGEST_NBYTES = (1 << 31) - 1  # of a record without the extension for large files, as zipfile has it


class Global(NamedTuple):
    """A class, function or dtype, by its name."""

    module: str
    name: str


@dataclasses.dataclass(frozen=True)
class Call:
    """What a function returns for these arguments."""

    function: Global
    arguments: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Instance:
    """An object that is made without arguments, and then gets its state: a dict of attributes, or what it takes."""

    of: Global
    state: Any = None


@dataclasses.dataclass(frozen=True)
class PersistentId:
    """Something that is in another record of the archive: a persistent id."""

    identity: tuple[Any, ...]


def size(shape: Sequence[int]) -> Call:
    """A `torch.Size`."""
    return Call(Global("torch", "Size"), (tuple(shape),))


def pickle_of(value: Any) -> bytes:
    """The pickle of a value of these classes, and of dicts, lists, tuples, str, int, bool and None.

    Globals and texts that occur again are written once.
    """
    memo: dict[Any, int] = {}
    return b"\x80\x02" + b"".join(_opcodes(value, memo)) + b"."


def _opcodes(value: Any, memo: dict[Any, int]) -> Iterator[bytes]:
    match value:
        case None:
            yield b"N"
        case bool():
            yield b"\x88" if value else b"\x89"
        case int():
            yield _integer(value)
        case str() | Global():
            yield _once(value, memo)
        case tuple():
            if len(value) > 3:
                yield b"("
            yield from _all(value, memo)
            yield b")" if not value else (b"\x85", b"\x86", b"\x87", b"t")[min(len(value), 4) - 1]
        case list():
            yield b"]("
            yield from _all(value, memo)
            yield b"e"
        case dict():
            yield b"}("
            yield from _all(itertools.chain.from_iterable(value.items()), memo)
            yield b"u"
        case Call():
            yield from _opcodes(value.function, memo)
            yield from _opcodes(value.arguments, memo)
            yield b"R"
        case Instance():
            yield from _opcodes(value.of, memo)
            yield b")\x81"
            if value.state is not None:
                yield from _opcodes(value.state, memo)
                yield b"b"
        case PersistentId():
            yield from _opcodes(value.identity, memo)
            yield b"Q"
        case _:
            raise TypeError(f"no pickle without its own class: {type(value).__name__}")


def _once(value: str | Global, memo: dict[Any, int]) -> bytes:
    """A text or a name, or the number of the one that was written before."""
    is_new, number = value not in memo, memo.setdefault(value, len(memo))
    short, long = (b"q%c", b"r") if is_new else (b"h%c", b"j")
    recalled = short % number if number < 256 else long + number.to_bytes(4, "little")
    if not is_new:
        return recalled
    if isinstance(value, Global):
        return f"c{value.module}\n{value.name}\n".encode() + recalled
    text = value.encode("utf-8", "surrogatepass")
    return b"X" + len(text).to_bytes(4, "little") + text + recalled


def _all(values: Any, memo: dict[Any, int]) -> Iterator[bytes]:
    for value in values:
        yield from _opcodes(value, memo)


def _integer(value: int) -> bytes:
    if 0 <= value < 1 << 16:
        return b"K%c" % value if value < 256 else b"M" + value.to_bytes(2, "little")
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + value.to_bytes(4, "little", signed=True)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a%c" % len(raw) + raw


def tensor_pickle(dtype: str, shape: tuple[int, ...]) -> bytes:
    """The pickle of a contiguous tensor on the CPU, whose bytes are the record ``0``."""
    count = math.prod(shape)
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(1, length)
    hooks = Call(Global("collections", "OrderedDict"), ())
    more: tuple[Global, ...] = ()
    if dtype in _STORAGES:
        storage = PersistentId(("storage", Global("torch", _STORAGES[dtype]), "0", "cpu", count))
        rebuild = "_rebuild_tensor_v2"
    else:
        nbytes = count * TORCH_ITEM_NBYTES[dtype]
        storage = PersistentId(("storage", Global("torch.storage", "UntypedStorage"), "0", "cpu", nbytes))
        rebuild, more = "_rebuild_tensor_v3", (Global("torch", dtype),)
    arguments = (storage, 0, shape, tuple(reversed(strides)), False, hooks, *more)
    return pickle_of(Call(Global("torch._utils", rebuild), arguments))


@functools.lru_cache(maxsize=4096)
def around_tensor(dtype: str, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """What is before the bytes of one tensor, and after them, in a file that `torch.load` reads."""
    nbytes = math.prod(shape) * TORCH_ITEM_NBYTES[dtype]
    skeleton = FileWithHoles()
    try:
        with zipfile.ZipFile(skeleton.file, "w") as archive:
            _write(archive, tensor_pickle(dtype, shape))
            record = zipfile.ZipInfo("archive/data/0")
            record.file_size = record.compress_size = nbytes
            record.CRC = 0  # PyTorch checks none
            record.header_offset = archive.start_dir
            is_large = nbytes > _LARGEST_NBYTES
            unpadded = record.header_offset + len(record.FileHeader(is_large)) + _PADDING.size
            padding = -unpadded % _ALIGNMENT
            record.extra = _PADDING.pack(b"FB", padding) + b"Z" * padding
            header = record.FileHeader(is_large)
            skeleton.file.seek(record.header_offset)
            skeleton.file.write(header)
            archive.filelist.append(record)
            start = record.header_offset + len(header)
            archive.start_dir = start + nbytes  # of what the archive writes at its end
        fd, end = skeleton.file.fileno(), start + nbytes
        return os.pread(fd, start, 0), os.pread(fd, os.fstat(fd).st_size - end, end)
    finally:
        skeleton.close()


def archive_of(content: bytes) -> bytes:
    """A file that `torch.load` reads, with a pickle that names no tensors."""
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as file:
        _write(file, content)
    return raw.getvalue()


def _write(file: zipfile.ZipFile, pickled_bytes: bytes) -> None:
    for name, content in (("data.pkl", pickled_bytes), ("byteorder", b"little"), ("version", b"3\n")):
        file.writestr(zipfile.ZipInfo(f"archive/{name}"), content)
