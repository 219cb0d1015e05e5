"""Copies past the caches, with checksums made of the very bytes that are copied: what `copy_kernel.c` does.

`setup.py` builds that where there is a C compiler, as a library that any version of Python loads. Without it NumPy and
xxhash do the same, in about twice the time.
"""

from __future__ import annotations

import ctypes
import enum
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

PART = np.dtype([("start", "<u8"), ("nbytes", "<u8"), ("source", "<u8")])
"""Bytes that go to a place in a body: where it starts there, a multiple of 64, and the address they come from."""

_PAIR = np.dtype([("target", "<u8"), ("source", "<u8"), ("nbytes", "<u8")])
_STRIPE_NBYTES, _LEAST_NBYTES = 64, 256  # the checksum of a shorter block is another function
_LARGE_NBYTES = 128 << 10  # smaller copies stay in the caches


class Todo(enum.IntEnum):
    """What is done with a block."""

    SKIP = 0
    COPY = 1
    COPY_AND_CHECK = 2


class Variant(enum.IntEnum):
    """How it is done."""

    NUMPY = -1
    PLAIN = 0
    AVX2 = 1  # 512 bits at a time are not faster, and slow some processors down


def _load() -> ctypes.CDLL | None:
    path = Path(__file__).with_name("libcopy_kernel.so.1")
    if sys.byteorder != "little" or not path.exists():
        return None
    library = ctypes.CDLL(os.fspath(path))
    size, address = ctypes.c_size_t, ctypes.c_void_p
    library.mlflash_fill.argtypes = (ctypes.c_int, address, size, size, address, size, address, size, size, address)
    library.mlflash_copy.argtypes = (ctypes.c_int, address, size)
    library.mlflash_fill.restype = library.mlflash_copy.restype = None
    return library


_library = _load()
FASTEST = Variant.NUMPY if _library is None else Variant(_library.mlflash_fastest())
"""The fastest variant on this host."""


def fill(body: np.ndarray, block_nbytes: int, parts: np.ndarray, todo: np.ndarray, first: int, last: int,
         table: np.ndarray | None, variant: Variant = FASTEST) -> None:  # fmt: skip
    """Fill blocks ``first`` to ``last - 1`` of a body from the parts that reach into them, and make their checksums.

    What is in no part stays, and counts in the checksum. Other threads run meanwhile.

    Args:
        body: ``(nbytes,)`` uint8.
        parts: `PART`, in the order of their starts; none overlaps another one's last 64 bytes. The caller keeps alive
            what they come from.
        todo: `Todo` of each block of the body, uint8.
        table: ``(blocks,)`` uint64, which gets the XXH3-64 of each block; None: no block is checked.
    """
    is_odd = body.nbytes % _STRIPE_NBYTES or block_nbytes % _STRIPE_NBYTES or block_nbytes < _LEAST_NBYTES
    is_odd = is_odd or 0 < body.nbytes % block_nbytes < _LEAST_NBYTES
    if _library is None or variant is Variant.NUMPY or is_odd:
        _fill(body, block_nbytes, parts, todo, first, last, table)
        return
    _library.mlflash_fill(variant, _address(body), body.nbytes, block_nbytes, _address(parts), len(parts),
                          _address(todo), first, last, 0 if table is None else _address(table))  # fmt: skip


def _fill(body: np.ndarray, block_nbytes: int, parts: np.ndarray, todo: np.ndarray, first: int, last: int,
          table: np.ndarray | None) -> None:  # fmt: skip
    ends = parts["start"] + parts["nbytes"]
    for block in range(first, last):
        start, end = block * block_nbytes, min((block + 1) * block_nbytes, body.nbytes)
        if todo[block] == Todo.SKIP:
            continue
        for number in range(int(np.searchsorted(ends, start, "right")), len(parts)):
            at, nbytes, source = map(int, parts[number])
            low, high = max(at, start), min(at + nbytes, end)
            if low >= high:
                break
            np.copyto(body[low:high], _at(source + low - at, high - low))
        if table is not None and todo[block] == Todo.COPY_AND_CHECK:
            table[block] = xxhash.xxh3_64_intdigest(body[start:end].data)


def copy(targets: Sequence[int], sources: Sequence[int], nbytes: Sequence[int], variant: Variant = FASTEST) -> None:
    """Copy bytes from addresses to others, which do not overlap. Other threads run meanwhile."""
    if _library is None or variant is Variant.NUMPY:
        for target, source, count in zip(targets, sources, nbytes, strict=True):
            np.copyto(_at(target, count), _at(source, count))
        return
    pairs = np.empty(len(targets), dtype=_PAIR)
    pairs["target"], pairs["source"], pairs["nbytes"] = targets, sources, nbytes
    _library.mlflash_copy(variant, _address(pairs), len(pairs))


def copy_into(target: np.ndarray, source: np.ndarray) -> None:
    """Copy an array into another one of its shape and dtype."""
    is_plain = source.flags.c_contiguous and target.flags.c_contiguous and target.flags.writeable
    if source.nbytes < _LARGE_NBYTES or not is_plain:
        target[...] = source
    else:
        copy(addresses([target]), addresses([source]), [source.nbytes])


def _address(array: np.ndarray) -> int:
    address: int = array.__array_interface__["data"][0]  # `array.ctypes` would leave cycles behind
    return address


def _at(address: int, nbytes: int) -> np.ndarray:
    room: Any = (ctypes.c_ubyte * nbytes).from_address(address)
    raw: np.ndarray = np.frombuffer(room, dtype=np.uint8)
    return raw


def addresses(values: Sequence[Any]) -> list[int]:
    """Where the bytes of tensors and arrays begin in memory."""
    torch = sys.modules.get("torch")
    if torch is not None and np.ndarray not in map(type, values):
        return list(map(torch.Tensor.data_ptr, values))
    return [_address(value) if isinstance(value, np.ndarray) else value.data_ptr() for value in values]


def aligned(nbytes: int) -> np.ndarray:
    """Memory that can be filled past the caches, ``(nbytes,)`` uint8, not initialized."""
    room = np.empty(nbytes + _STRIPE_NBYTES, dtype=np.uint8)
    start = -_address(room) % _STRIPE_NBYTES
    return room[start : start + nbytes]
