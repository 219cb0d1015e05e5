"""Pickles of PyTorch's objects, and the archives of its tensors, made without PyTorch.

A courier that imports PyTorch takes hundreds of MiB and seconds of a core, for a few names: a pickle only names classes
and functions, and `torch.load` finds them when it reads it.

Source: the protocol 2 of Python's pickletools, and what `torch.save` of PyTorch 2.13 writes.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import itertools
import math
import os
import struct
import zipfile
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ..state.leaves import TORCH_ITEM_NBYTES
from .file_holes import FileWithHoles

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
class Stored:
    """Something that is in another record of the archive: a persistent id."""

    identity: tuple[Any, ...]


def size(shape: Sequence[int]) -> Call:
    """A `torch.Size`."""
    return Call(Global("torch", "Size"), (tuple(shape),))


def pickled(value: Any) -> bytes:
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
        case Stored():
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
        storage = Stored(("storage", Global("torch", _STORAGES[dtype]), "0", "cpu", count))
        rebuild = "_rebuild_tensor_v2"
    else:
        nbytes = count * TORCH_ITEM_NBYTES[dtype]
        storage = Stored(("storage", Global("torch.storage", "UntypedStorage"), "0", "cpu", nbytes))
        rebuild, more = "_rebuild_tensor_v3", (Global("torch", dtype),)
    arguments = (storage, 0, shape, tuple(reversed(strides)), False, hooks, *more)
    return pickled(Call(Global("torch._utils", rebuild), arguments))


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


def archive(pickle: bytes) -> bytes:
    """A file that `torch.load` reads, with a pickle that names no tensors."""
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as file:
        _write(file, pickle)
    return raw.getvalue()


def _write(file: zipfile.ZipFile, pickle: bytes) -> None:
    for name, content in (("data.pkl", pickle), ("byteorder", b"little"), ("version", b"3\n")):
        file.writestr(zipfile.ZipInfo(f"archive/{name}"), content)
