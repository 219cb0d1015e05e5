"""Tensors without memory, so that ``torch.save`` writes a file with holes where their bytes go."""

from __future__ import annotations

import math
import mmap
import os
import struct
import zipfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .file_holes import FileWithHoles

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
