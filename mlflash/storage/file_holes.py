"""A file without the bytes of its tensors: what a library writes around them, and where they go.

The library (h5py, torch.save) writes into memory, where the places of the tensors are holes that take no memory. The
file system then gets one stream of plain writes, front to back. These release the GIL, can be paced and given up, end
in an OSError if the file system fails, and hold none of the library's locks while the file system is slow.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

Source = Callable[[], np.ndarray]
"""Gives the bytes of a tensor, ``(nbytes,)`` uint8."""


class _Place(NamedTuple):
    """Bytes that are not in memory yet; ``is_tensor``: they have checksums of their own."""

    start: int
    nbytes: int
    source: Source
    is_tensor: bool


class FileWithHoles:
    """A file being put together in memory."""

    def __init__(self) -> None:
        # a library may write into it, from the start, leaving the places of tensors out
        self.file = io.FileIO(os.memfd_create("mlflash-skeleton", os.MFD_CLOEXEC), "w+b")
        self._places: list[_Place] = []

    def place(self, start: int, nbytes: int, source: Source, is_tensor: bool = True) -> None:
        """Note that a tensor's bytes, or other bytes, belong at ``start``; the file gets at least that long."""
        if nbytes:
            self._places.append(_Place(start, nbytes, source, is_tensor))
            if self.nbytes < start + nbytes:
                os.ftruncate(self.file.fileno(), start + nbytes)

    @property
    def nbytes(self) -> int:
        """Size of the file as it is now, tensors included."""
        return os.fstat(self.file.fileno()).st_size

    def patch(self, start: int, content: bytes) -> None:
        """Write something that the library does not know about."""
        os.pwrite(self.file.fileno(), content, start)

    def stream(self, chunk_nbytes: int, tensors: bool = True) -> Iterator[memoryview]:
        """Yield the file, front to back, in pieces of at most so many bytes; ``tensors``: with their bytes."""
        at = 0
        for start, nbytes, source, is_tensor in sorted(self._places, key=lambda place: place.start):
            yield from self._between(at, start, chunk_nbytes)
            at = start + nbytes
            if is_tensor and not tensors:
                continue
            content = source().data
            if content.nbytes != nbytes:
                raise AssertionError(f"a tensor has {content.nbytes} bytes, not {nbytes}")
            for first in range(0, nbytes, chunk_nbytes):
                yield content[first : first + chunk_nbytes]
            del content  # free this memory before the next source needs some
        yield from self._between(at, self.nbytes, chunk_nbytes)

    def _between(self, at: int, end: int, chunk_nbytes: int) -> Iterator[memoryview]:
        while at < end:
            content = os.pread(self.file.fileno(), min(chunk_nbytes, end - at), at)
            yield memoryview(content)
            at += len(content)

    def digest_beside_tensors(self, chunk_nbytes: int) -> str:
        """SHA-256 of the bytes of the file that belong to no tensor, front to back. No tensor is read."""
        made = hashlib.sha256()
        for content in self.stream(chunk_nbytes, tensors=False):
            made.update(content)
        return made.hexdigest()

    def close(self) -> None:
        """Free its memory. May be called twice."""
        self.file.close()
