"""Files of tmpfs in huge pages, and without."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
import pytest

from mlflash.memory import shared_memory_segment

SHM = "/dev/shm"
NBYTES = 5 << 20  # two huge pages and a half, where these are of 2 MiB


@pytest.fixture
def file() -> Iterator[IO[bytes]]:
    with tempfile.TemporaryFile(dir=SHM) as opened:
        opened.truncate(NBYTES)
        yield opened


def mappings(inode: int) -> int:
    return sum(line.split()[4] == str(inode) for line in Path("/proc/self/maps").read_text().splitlines())


def huge_kib(address: int) -> int:
    """KiB of the mapping that begins there which are huge pages, as the kernel says."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.startswith(f"{address:x}-"):
            break
    return next(int(line.split()[1]) for line in lines if line.startswith("ShmemPmdMapped:"))


def test_it_is_unmapped_when_the_last_view_goes(file: IO[bytes]) -> None:
    inode = os.fstat(file.fileno()).st_ino
    view = shared_memory_segment.map_file(file.fileno(), NBYTES)
    part = view[100:200].view(np.int32)
    del view
    gc.collect()
    assert mappings(inode) == 1
    assert part.sum() == 0
    del part
    gc.collect()
    assert mappings(inode) == 0


def test_an_empty_file_gets_huge_pages_where_the_kernel_gives_them(file: IO[bytes]) -> None:
    view = shared_memory_segment.map_file(file.fileno(), NBYTES)
    if not shared_memory_segment.fill_with_huge_pages(file.fileno(), view):
        assert not shared_memory_segment.huge_nbytes() or tuple(map(int, os.uname().release.split(".")[:2])) < (6, 1)
        return
    assert not view.any()
    assert (
        huge_kib(view.ctypes.data) << 10 >= shared_memory_segment.huge_nbytes()
    )  # all of it, but for fragmented memory
    os.posix_fallocate(file.fileno(), 0, NBYTES)
    assert os.fstat(file.fileno()).st_blocks * 512 >= NBYTES
