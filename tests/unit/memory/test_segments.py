"""Mapped files of tmpfs: in huge pages, and page-locked by CUDA, which is played, as it is not here."""

from __future__ import annotations

import fcntl
import gc
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import numpy as np
import pytest
from waiting import PATIENCE_S, until

from mlflash.memory import shared_memory_segment
from mlflash.memory.node_directory import NodeDirectory
from mlflash.memory.shared_memory_segment import create

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
    huge = huge_kib(view.ctypes.data) << 10  # all of it, but for fragmented memory
    assert huge >= shared_memory_segment.huge_nbytes()
    os.posix_fallocate(file.fileno(), 0, NBYTES)
    assert os.fstat(file.fileno()).st_blocks * 512 >= NBYTES


# Page-locked


PORTABLE = 1


class Cudart:
    """What torch.cuda.cudart() gives.

    Args:
        status: of cudaHostRegister; 0: it works.
    """

    def __init__(self, status: int):
        self.status = status
        self.asked: list[tuple[int, int, int]] = []
        self.pinned: list[int] = []
        self.launches = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.asked.append((address, nbytes, flags))
        self.pinned += [address] * (self.status == 0)
        return self.status

    def cudaHostUnregister(self, address: int) -> None:
        self.pinned.remove(address)


@pytest.fixture(params=[0, 2])
def cudart(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Cudart:
    played = Cudart(request.param)

    def zeros(*shape: int, device: str) -> None:
        played.launches += 1
        raise RuntimeError("CUDA error: out of memory")  # that of the call before, as torch says it at a launch

    cuda = SimpleNamespace(is_available=lambda: True, cudart=lambda: played)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda, zeros=zeros))
    return played


def test_an_error_of_pinning_does_not_stay_for_the_next_kernel(node_memory: NodeDirectory, cudart: Cudart) -> None:
    create(node_memory, 10_000).pin()
    assert cudart.launches == (1 if cudart.status else 0)


def test_a_mapping_that_several_have_is_pinned_once_until_the_last_has_closed_it(
    node_memory: NodeDirectory, cudart: Cudart
) -> None:
    """A restore maps what training has mapped once more, and closes one of the two; to pin anew costs a copy."""
    first = create(node_memory, 10_000)
    address = first.view.ctypes.data
    first.pin()
    first.pin()
    second = first.duplicate()
    second.pin()
    first.close()
    first.close()
    second.duplicate().close()
    assert cudart.asked == [(address, 12_288, PORTABLE)]
    assert cudart.pinned == ([address] if cudart.status == 0 else [])
    second.close()
    assert cudart.pinned == []


@pytest.mark.parametrize("question", ["is_gone", "is_lent"])
def test_what_is_asked_of_a_file_is_answered_before_another_thread_closes_it(
    monkeypatch: pytest.MonkeyPatch, shm: Path, question: str
) -> None:
    memory = NodeDirectory(str(shm), "t")
    segment = create(memory, 4096)
    real = {"is_gone": os.fstat, "is_lent": fcntl.fcntl}[question]
    closing = threading.Thread(target=segment.close, daemon=True)

    def interrupted(fd: int, *more: Any) -> Any:
        closing.start()
        until(lambda: not closing.is_alive() or segment._asking.locked(), "the other thread to come")
        return real(fd, *more)

    with monkeypatch.context() as patched:
        module = os if question == "is_gone" else fcntl
        patched.setattr(module, real.__name__, interrupted)
        assert getattr(segment, question) is False
    closing.join(PATIENCE_S)
    assert not closing.is_alive() and getattr(segment, question) is False
    memory.close()
