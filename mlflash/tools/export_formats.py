"""Write a checkpoint as safetensors, a file of ``torch.save``, a directory of PyTorch DCP, or a file of HDF5."""

from __future__ import annotations

import fnmatch
import json
import math
import mmap
import os
import struct
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ..errors import ConfigError, StateError
from ..state.leaves import Entry, Tree, from_bytes, item_nbytes
from ..state.paths import plain_leaves
from ..state.plain_values import decode_plain
from ..storage.file_holes import FileWithHoles, Source
from ..storage.store import Store
from ..storage.whole_state import BATCH_NBYTES, Whole, Written, build, cut, tensor_dtype

if TYPE_CHECKING:
    import torch

SHARD_NBYTES = 5 * 10**9  # the size at which Hugging Face cuts
_HEADER_NBYTES = 100_000_000  # the safetensors library refuses longer ones
_CHUNK_NBYTES = 64 << 20
_LOCAL_HEADER = struct.Struct("<26xHH")  # of a zip record; it ends with the lengths of name and extra field

DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip
_CONFIGURATION = ("*.json", "*.jinja", "*.model", "*.py", "*.tiktoken", "merges.txt", "vocab.txt")
FILE_NBYTES = 4 << 30


def write_safetensors(whole: Whole, store: Store, shard_nbytes: int = SHARD_NBYTES) -> Written:
    """Write all tensors and arrays of a checkpoint.

    Collective if reading the checkpoint is. Of tied tensors only the first one is written, as Hugging Face does. The
    result names the others. This format cannot hold plain leaves.

    Args:
        store: where the files go: ``model.safetensors``, or ``model-00001-of-00003.safetensors``, … and
            ``model.safetensors.index.json``, last.
        shard_nbytes: most bytes of tensors in a file. A larger tensor gets its own file.

    Raises:
        StateError: the format does not have this dtype. The error names the tensor.
    """
    # In a file larger elements come first, so that each tensor begins at a multiple of its element's size.
    names_of_shards = cut({entry.name: entry.nbytes for entry in whole.own}, shard_nbytes) or [[]]
    shards = [sorted((whole.entries[name] for name in names), reverse=True,
                     key=lambda entry: item_nbytes(entry.kind, entry.dtype)) for names in names_of_shards]  # fmt: skip
    headers = [_header(shard) for shard in shards]
    sources = whole.sources([entry for shard in shards for entry in shard])
    count = len(shards)
    names = [f"model-{at:05d}-of-{count:05d}.safetensors" if count > 1 else "model.safetensors"
             for at in range(1, count + 1)]  # fmt: skip
    files = {name: store.write(name, _content(header, shard, sources))
             for name, header, shard in zip(names, headers, shards, strict=True)}  # fmt: skip
    if count > 1:
        index = "model.safetensors.index.json"
        files[index] = store.write(index, [_index(names, shards)])
    return Written(files, len(whole.own), whole.ties, tuple(plain_leaves(whole.tree)))


def _header(shard: list[Entry]) -> bytes:
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for entry in shard:
        dtype = tensor_dtype(entry)
        if dtype not in DTYPES or entry.name in fields:
            raise StateError("safetensors cannot hold this tensor: leave it out with --drop, or --rename it",
                             tensor=entry.name, expected=f"one of {', '.join(DTYPES)}", found=dtype)  # fmt: skip
        end = start + entry.nbytes
        fields[entry.name] = {"dtype": DTYPES[dtype], "shape": entry.shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    if len(text) > _HEADER_NBYTES:
        raise ConfigError("a file has too many tensors for safetensors: choose smaller shards",
                          expected=f"a header of at most {_HEADER_NBYTES} bytes", found=len(text))  # fmt: skip
    return len(text).to_bytes(8, "little") + text


def _content(header: bytes, shard: list[Entry], sources: Mapping[str, Source]) -> Iterator[memoryview]:
    yield memoryview(header)
    for entry in shard:
        if entry.nbytes:
            content = sources[entry.name]().data
            for at in range(0, content.nbytes, _CHUNK_NBYTES):
                yield content[at : at + _CHUNK_NBYTES]


def _index(names: list[str], shards: list[list[Entry]]) -> bytes:
    total = sum(entry.nbytes for shard in shards for entry in shard)
    weight_map = {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def copy_config(source: str | os.PathLike[str], store: Store) -> dict[str, int]:
    """Copy a model's configuration and tokenizer, which ``from_pretrained`` needs in addition to the weights.

    Follow links, because the cache of Hugging Face has only links.

    Raises:
        ConfigError: there is no ``config.json``.
    """
    directory = Path(source)
    if not (directory / "config.json").is_file():
        raise ConfigError("this directory has no Hugging Face config.json", found=directory)
    files = sorted(
        path for path in directory.iterdir() if path.is_file() and not path.name.endswith(".index.json")
        and any(fnmatch.fnmatch(path.name, wanted) for wanted in _CONFIGURATION)
    )  # fmt: skip
    return {path.name: store.write(path.name, [path.read_bytes()]) for path in files}


# Files of torch.save, HDF5 and DCP


def write_torch(whole: Whole, store: Store, name: str = "state.pt") -> Written:
    """Write a checkpoint as one file for ``torch.load``.

    Collective if reading the checkpoint is. Tied tensors stay tied. Arrays become tensors, and numbers of numpy become
    numbers of Python, so that ``torch.load(weights_only=True)`` accepts the file.

    Raises:
        StateError: torch has no dtype for an array. The error names it.
    """
    names, numbers = list(whole.entries), list[int]()
    build(whole.tree, numbers.append, lambda _: None)
    firsts = dict.fromkeys(whole.ties.get(names[number], names[number]) for number in numbers)
    own = [whole.entries[first] for first in firsts]  # in the order in which torch numbers storages
    empty = _hollow([(tensor_dtype(entry), entry.shape) for entry in own])
    tensors = dict(zip(firsts, empty, strict=True))
    state = build(whole.tree, lambda number: tensors[whole.ties.get(names[number], names[number])],
                  lambda number: _python(decode_plain(whole.plain[number])))  # fmt: skip
    sources = whole.sources(own)
    skeleton = FileWithHoles()
    for start, entry in zip(_save(state, skeleton), own, strict=True):
        skeleton.place(start, entry.nbytes, sources[entry.name])
    return Written({name: _write(store, name, skeleton)}, len(own), whole.ties)


def _hollow(dtypes_and_shapes: Sequence[tuple[str, tuple[int, ...]]]) -> list[torch.Tensor]:
    """Make tensors without memory; each has a storage of its own. They must never be read or written."""
    import torch

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


def _save(value: Any, skeleton: FileWithHoles) -> list[int]:
    """Write a value of hollow tensors as ``torch.save`` does; return where the bytes of each storage go, in order."""
    import torch

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


def _write(store: Store, name: str, skeleton: FileWithHoles) -> int:
    try:
        return store.write(name, skeleton.stream(_CHUNK_NBYTES))
    finally:
        skeleton.close()


def _python(value: Any) -> Any:
    if isinstance(value, np.generic) and isinstance(item := value.item(), (bool, int, float, complex, str, bytes)):
        return item
    return value


def write_hdf5(whole: Whole, store: Store, name: str = "state.h5") -> Written:
    """Write a checkpoint as one HDF5 file: ``/tensors/<name>``, and everything else as JSON in ``/objects``."""
    from ..drain import hdf5_format

    own, sources = whole.own, whole.sources(whole.own)
    objects = hdf5_format.readable(whole.tree, list(whole.entries), whole.plain)
    skeleton, _ = hdf5_format.tensors(own, [sources[entry.name] for entry in own], whole.ties, objects)
    return Written({name: _write(store, name, skeleton)}, len(own), whole.ties)


def write_dcp(whole: Whole, store: Store, file_nbytes: int = FILE_NBYTES) -> Written:
    """Write a checkpoint as a DCP checkpoint of one rank, which ``torch.distributed.checkpoint.load`` reads.

    Collective if reading the checkpoint is. Tied tensors are stored once, and each of their keys finds them. Objects
    (numbers, strings, arrays, tuples) are pickled, as in DCP.

    Args:
        file_nbytes: most bytes of tensors in a file. A larger tensor gets its own file.

    Raises:
        StateError: the state is not a dict, or torch cannot load a dtype.
    """
    from ..storage.dcp_files import METADATA, Contents, keys_of, metadata, pickled, rank_file

    entries = list(whole.entries.values())
    keys = keys_of(whole.tree, entries)
    first: dict[str, str] = {}
    ties: dict[str, str] = {}
    own: dict[str, Entry] = {}
    for key, number in keys.tensors.items():
        name = whole.ties.get(entries[number].name, entries[number].name)
        if (other := first.setdefault(name, key)) != key:
            ties[key] = other
        else:
            tensor_dtype(entries[number])  # raises before anything is written
            own[key] = whole.entries[name]
    sources = whole.sources(list(own.values()))
    # Objects are in memory while their file is written.
    objects = {key: sum(entry.nbytes for entry in _inside(entries, tree)) for key, tree in keys.objects.items()}
    groups = [*cut({key: entry.nbytes for key, entry in own.items()}, file_nbytes),
              *cut(objects, BATCH_NBYTES)]  # fmt: skip
    files, written = [], {}
    for number, group in enumerate(groups):
        of_tensors, of_objects = [key for key in group if key in own], [key for key in group if key in objects]
        pieces = [msgspec.structs.replace(own[key], name=key) for key in of_tensors]
        extras = {key: pickled(_object(whole, entries, keys.objects[key])) for key in of_objects}
        skeleton, places, _ = rank_file(pieces, [sources[own[key].name] for key in of_tensors], extras)
        name = f"__0_{number}.distcp"
        written[name] = _write(store, name, skeleton)
        files.append(Contents(name, pieces, list(extras), places))
    written[METADATA] = store.write(METADATA, [metadata(files, keys.paths, ties)])
    return Written(written, len(own), ties)


def _inside(entries: Sequence[Entry], tree: Tree) -> list[Entry]:
    inside: list[Entry] = []
    build(tree, lambda number: inside.append(entries[number]), lambda _: None)
    return inside


def _object(whole: Whole, entries: Sequence[Entry], tree: Tree) -> Any:
    names = [entry.name for entry in _inside(entries, tree)]
    raw = whole.read(names) if names else {}
    return build(tree, lambda number: from_bytes(entries[number], np.array(raw[entries[number].name])),
                 lambda number: decode_plain(whole.plain[number]))  # fmt: skip
