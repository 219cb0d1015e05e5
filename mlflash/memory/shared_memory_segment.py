"""A named file in node memory, mapped by this rank; it outlives the process.

Room is taken in huge pages if there are any, and with ``posix_fallocate`` (a full tmpfs is an error, not SIGBUS). Other
pages are faulted in once, in the background, with MADV_POPULATE_WRITE: a copy into fresh tmpfs pages takes 4 to 10
times as long as into pages that exist.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import logging
import mmap
import os
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from ..errors import CorruptSlot
from ..events import Event
from ..state.layout import PAGE_NBYTES, round_up
from .node_directory import NodeDirectory, too_small

log = logging.getLogger("mlflash")

_MADV_POPULATE_WRITE = 23  # Linux 5.14; not a constant of Python's mmap
_FLOCK = struct.Struct("hhlli")  # struct flock on 64-bit Linux
_PORTABLE = 1  # cudaHostRegisterPortable: for all devices of the process
_PREFAULT_NBYTES = 64 << 20  # per system call, so that close() need not wait long


class Writer(Protocol):
    """Something that copies into a segment."""

    @property
    def is_done(self) -> bool: ...


_never_unmapped: list[Segment] = []  # a device may write into these until the process ends


class _Pinning:
    """Whether a mapping is page-locked, for all segments that use it: locking it for each costs more than a copy."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.segments = 0
        self.was_tried = self.is_done = False

    def pin(self, view: np.ndarray) -> None:
        """Page-lock it, unless that was already tried; `lock` is held."""
        if self.was_tried or not view.nbytes:
            return
        self.was_tried = True
        torch = sys.modules["torch"]
        status = torch.cuda.cudart().cudaHostRegister(view.ctypes.data, view.nbytes, _PORTABLE)
        self.is_done = int(status) == 0
        if not self.is_done:  # copies are only slower; but CUDA would report this error for the next kernel
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device="cuda")

    def leave(self, view: np.ndarray) -> None:
        """Note that one segment less uses it; `lock` is held."""
        self.segments -= bool(view.nbytes)
        if self.is_done and self.segments == 0 and view.nbytes:
            sys.modules["torch"].cuda.cudart().cudaHostUnregister(view.ctypes.data)
            self.is_done = False


class Segment:
    """A mapped slot file; made by :func:`create`, :func:`grow` or :func:`attach`."""

    def __init__(
        self, name: str, fd: int, nbytes: int, fresh: bool, private: bool = False, same: Segment | None = None
    ):
        self.name = name
        self.nbytes = nbytes
        self.inode = os.fstat(fd).st_ino  # no other file can get it while this mapping exists
        self.ready: Event = Event() if same is None else same.ready  # set once the pages are there
        self.writers: list[Writer] = []  # copies into it that a device or another thread may still be making
        self._fresh = fresh
        self._lock = threading.Lock()
        self._asking = threading.Lock()  # held to ask something of the file, or to close it
        # its bytes, shape (nbytes,), uint8
        self.view: np.ndarray = map_file(fd, nbytes, private) if same is None else same.view
        self._pinning: _Pinning = _Pinning() if same is None else same._pinning
        with self._pinning.lock:
            self._pinning.segments += 1
        self._fd = os.dup(fd)
        self._close_file = weakref.finalize(self, os.close, self._fd)
        self._close_file.atexit = False

    def duplicate(self) -> Segment:
        """Return the same mapping once more; it exists until both are closed."""
        return Segment(self.name, self._fd, self.nbytes, fresh=False, same=self)

    @property
    def is_lent(self) -> bool:
        """Whether any process of this node has views of the file; see `lend`."""
        with self._asking:
            return self._close_file.alive and _ask(self._fd, fcntl.F_OFD_GETLK, fcntl.F_WRLCK) != fcntl.F_UNLCK

    @property
    def is_gone(self) -> bool:
        """Whether somebody has removed the file: nothing finds it after the end of this process."""
        with self._asking:
            return self._close_file.alive and not os.fstat(self._fd).st_nlink

    def prefault(self) -> None:
        """Fault the pages in, and pin them if there is CUDA. Not collective; done once."""
        at = 0
        try:
            while at < self.nbytes and not self.ready.is_set():
                with self._lock:
                    if not self.view.nbytes:
                        break
                    length = min(_PREFAULT_NBYTES, self.nbytes - at)
                    failed = advise(self.view.ctypes.data + at, length, _MADV_POPULATE_WRITE)
                    if failed and self._fresh:  # an older kernel: touch each page; nobody uses the slot before `ready`
                        self.view[at : at + length : mmap.PAGESIZE] = 0
                    at += length
        finally:  # even after an error: it only costs time, and others wait
            self.ready.set()

    def pin(self) -> None:
        """Page-lock the segment for copies from CUDA devices; nothing happens without CUDA. Any thread; done once."""
        torch = sys.modules.get("torch")
        if self._pinning.was_tried or torch is None or not torch.cuda.is_available():
            return
        with self._lock, self._pinning.lock:
            self._pinning.pin(self.view)

    @property
    def is_written_to(self) -> bool:
        self.writers = [writer for writer in self.writers if not writer.is_done]
        return bool(self.writers)

    def close(self) -> None:
        """Unmap, unless something is still copying into it; the file stays. May be called twice."""
        self.ready.set()
        if self.is_written_to:
            _never_unmapped.append(self)
            return
        with self._lock, self._pinning.lock:
            self._pinning.leave(self.view)
            self.view = np.empty(0, dtype=np.uint8)
        with self._asking:
            self._close_file()


def lend(memory: NodeDirectory, name: str) -> tuple[Segment, Callable[[], None]]:
    """Map a file for views: what is written to them stays here, and nobody else may write the file while it is lent.

    A lock on the file marks it as lent. The lock ends with the process, and every rank of the node that
    gets the file meanwhile sees it. A file that is deleted stays as it is for those that have views of it.

    Returns:
        The mapping, and a function to call once it has no views any more.
    """
    fd = memory.open(name, os.O_RDWR)
    try:
        _ask(fd, fcntl.F_OFD_SETLK, fcntl.F_RDLCK)
        segment = attach(memory, name, private=True)
    except BaseException:
        os.close(fd)
        raise
    return segment, functools.partial(_take_back, fd, os.getpid())


def _take_back(fd: int, lender: int) -> None:
    if os.getpid() == lender:  # not in a forked child: the parent still has its views
        _ask(fd, fcntl.F_OFD_SETLK, fcntl.F_UNLCK)  # closing is not enough: a child has the descriptor, too
    os.close(fd)


def _ask(fd: int, command: int, kind: int) -> int:
    """Set or test a lock on a whole file that belongs to its descriptor, not to the process; return the lock found."""
    return int(_FLOCK.unpack(fcntl.fcntl(fd, command, _FLOCK.pack(kind, os.SEEK_SET, 0, 0, 0)))[0])


def create(memory: NodeDirectory, nbytes: int) -> Segment:
    """Make a new segment of at least ``nbytes``, all allocated. Raises MemoryTooSmall; then nothing is left behind."""
    nbytes = round_up(max(nbytes, PAGE_NBYTES), PAGE_NBYTES)
    name, fd = memory.new_slot_name()
    return _allocated(memory, name, fd, nbytes)


def grow(memory: NodeDirectory, segment: Segment, nbytes: int) -> Segment:
    """Make the file of a segment larger, and map it anew; it keeps its pages, because making others takes long.

    The segment is closed in any case; other processes that map the file still have its beginning. If
    its file was removed, another one is made (a trainer removes a file that a device does not release).

    Raises:
        MemoryTooSmall: the file system is full; the file is removed.
    """
    fd = -1
    with contextlib.suppress(FileNotFoundError):
        fd = memory.open(segment.name, os.O_RDWR)
    if fd >= 0 and os.fstat(fd).st_ino == segment.inode:
        try:
            return _allocated(memory, segment.name, fd, round_up(nbytes, PAGE_NBYTES), segment.nbytes)
        finally:
            segment.close()
    if fd >= 0:
        os.close(fd)
    segment.close()
    return create(memory, nbytes)


def _allocated(memory: NodeDirectory, name: str, fd: int, nbytes: int, begin: int = 0) -> Segment:
    """Give a file its size, and pages from ``begin`` on; if that fails, remove it. Its descriptor is closed."""
    segment: Segment | None = None
    try:
        os.truncate(fd, nbytes)
        segment = Segment(name, fd, nbytes, fresh=True)
        fill_with_huge_pages(fd, segment.view, begin)
        os.posix_fallocate(fd, 0, nbytes)
        return segment
    except OSError as error:
        if segment is not None:
            segment.close()
        memory.remove(name)
        if full := too_small(error, memory.path, f"{nbytes} bytes for a slot"):
            raise full from None
        raise
    finally:
        os.close(fd)


def attach(memory: NodeDirectory, name: str, mapped: Mapping[int, Segment] | None = None, private: bool = False,
           duplicated: Mapping[int, Segment] | None = None) -> Segment:  # fmt: skip
    """Map a segment that an earlier process left.

    Args:
        mapped: existing mappings, by inode. A mapping of the same file is returned instead of a new one, whose pages
            would have to be faulted in again (which takes longer than reading them).
        private: what is written to it stays here: pages that are written to are copied first.
        duplicated: likewise, but the mapping is duplicated, and the caller closes what it gets in any case.

    Raises:
        CorruptSlot: the file is shorter than a page, or has holes that memory has no room to fill.
        UnsafePath: it is not a private file of this user.
    """
    fd = memory.open(name, os.O_RDWR)
    try:
        status = os.fstat(fd)
        nbytes = status.st_size // PAGE_NBYTES * PAGE_NBYTES
        if nbytes == 0:
            raise CorruptSlot(f"{name} is shorter than a page")
        known = (mapped or {}).get(status.st_ino)
        if known is not None and known.nbytes == nbytes:
            return known
        known = (duplicated or {}).get(status.st_ino)
        if known is not None and known.nbytes == nbytes:
            return known.duplicate()
        if status.st_blocks * 512 < nbytes:  # on a full tmpfs, a write to a hole would end in SIGBUS
            os.posix_fallocate(fd, 0, nbytes)
        return Segment(name, fd, nbytes, fresh=False, private=private)
    except OSError as error:
        raise CorruptSlot(f"{name} cannot be mapped: {error.strerror}") from error
    finally:
        os.close(fd)


def prefault_in_background(segments: Sequence[Segment], pin: bool = False) -> None:
    """Fault in the pages of segments, one after the other, on a thread of its own; ``pin``: page-lock them, too."""
    todo = [segment for segment in segments if pin or not segment.ready.is_set()]

    def run() -> None:
        for segment in todo:
            try:
                segment.prefault()
                if pin:
                    segment.pin()
            except Exception:  # for example of CUDA; others wait for the remaining segments
                log.warning("the pages of %s could not be prepared", segment.name, exc_info=True)

    if not todo:
        return
    try:
        threading.Thread(target=run, name="mlflash-prefault", daemon=True).start()
    except RuntimeError:  # no thread can be started
        run()


# Huge pages


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


def fill_with_huge_pages(fd: int, view: np.ndarray, begin: int = 0) -> bool:
    """Give an empty file huge pages from ``begin`` on; return whether the kernel has any. The rest stays a hole.

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
