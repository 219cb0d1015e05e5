"""Maps a file of tmpfs where huge pages fit, and fills it with them before anything is written to it.

A page of 4 KiB costs a fault in each process that maps it, and frequent walks of the page tables. With huge pages a
slot is made in half the time, and a relaunched job reads it in half the time. Most clusters mount /dev/shm without
them, but since Linux 6.1 a process may ask for them by itself, with MADV_COLLAPSE.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import time
import weakref
from typing import Any

import numpy as np

_MADV_COLLAPSE = 25  # Linux 6.1; not a constant of Python's mmap
_MAP_FIXED = 0x10
_SIZE_FILE = "/sys/kernel/mm/transparent_hugepage/hpage_pmd_size"
_AT_ONCE_NBYTES = 64 << 20  # per system call, so that other threads that map memory need not wait long
# A call usually takes 10 to 70 ms. After a slower one, no more are made: the kernel must move memory for them.
_SLOW_S = 0.5
_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class _Mapping:
    """Memory that is unmapped when it has no views any more; NumPy asks for its interface."""

    def __init__(self, address: int, nbytes: int):
        self.__array_interface__ = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}
        # Not at exit, because threads may still write then.
        weakref.finalize(self, _libc.munmap, address, nbytes).atexit = False


def map_file(fd: int, nbytes: int, private: bool = False) -> np.ndarray:
    """Map the first bytes of a file, readable and writable, so that huge pages of the file are huge pages in memory.

    Args:
        fd: may be closed afterwards.
        nbytes: whole pages, at least one.
        private: what is written stays in this process.

    Returns:
        Its bytes, shape ``(nbytes,)``, uint8. They are unmapped when the last view of them is deleted.

    Raises:
        OSError: as by mmap.
    """
    step = huge_nbytes()
    if not step:
        return np.frombuffer(mmap.mmap(fd, nbytes, mmap.MAP_PRIVATE if private else mmap.MAP_SHARED), dtype=np.uint8)
    # Address and place in the file must be equally far from a whole huge page. So reserve room first.
    reserved = _mapped(None, nbytes + step, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    start = -(-reserved // step) * step
    kind = (mmap.MAP_PRIVATE if private else mmap.MAP_SHARED) | _MAP_FIXED
    try:
        _mapped(start, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, kind, fd)
    except OSError:
        _libc.munmap(reserved, nbytes + step)
        raise
    if start > reserved:
        _libc.munmap(reserved, start - reserved)
    if reserved + step > start:
        _libc.munmap(start + nbytes, reserved + step - start)
    return np.asarray(_Mapping(start, nbytes))


def fill(fd: int, view: np.ndarray, begin: int = 0) -> bool:
    """Give an empty file huge pages if the kernel has them; the rest of the file stays a hole.

    Args:
        begin: where its empty part begins.

    Returns:
        Whether the kernel gives any.

    Raises:
        OSError: ENOSPC, the file system is full.
    """
    step, start = huge_nbytes(), view.ctypes.data
    if not step:
        return False
    end = view.nbytes // step * step
    for at in range(-(-begin // step) * step, end, _AT_ONCE_NBYTES):
        length = min(_AT_ONCE_NBYTES, end - at)
        for place in range(at, at + length, step):
            # The kernel refuses a range without any page. A write through the mapping may end in SIGBUS.
            os.pwrite(fd, b"\0", place)
        began = time.monotonic()
        if advise(start + at, length, _MADV_COLLAPSE) == errno.EINVAL:
            return False  # the kernel is older, or its settings forbid it
        if time.monotonic() - began > _SLOW_S:
            break
    return end > 0


def advise(address: int, nbytes: int, advice: int) -> int:
    """Call madvise, with advice that Python's mmap need not know; return 0, or the error number."""
    return 0 if _libc.madvise(address, nbytes, advice) == 0 else ctypes.get_errno()


@functools.cache
def huge_nbytes() -> int:
    """Bytes of a huge page; 0 if there are none, or if they are so large that slots would hardly have any."""
    try:
        with open(_SIZE_FILE, encoding="ascii") as file:
            nbytes = int(file.read())
    except (OSError, ValueError):
        return 0
    return nbytes if nbytes <= _AT_ONCE_NBYTES and _AT_ONCE_NBYTES % nbytes == 0 else 0


def _mapped(address: int | None, nbytes: int, may: int, kind: int, fd: int) -> Any:
    at = _libc.mmap(address, nbytes, may, kind, fd, 0)
    if at == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return at
