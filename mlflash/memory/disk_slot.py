"""Slots on a disk of this node: copies and parity that take no memory.

They have the bytes of slots in memory. But they are read and written by calls, and not mapped: an error of the disk is
then an exception, where a mapped file would kill the process. And the calls pass by the cache of the kernel (O_DIRECT)
where the file system allows it, so that the memory of training is not evicted.

A slot is sealed only when its bytes are on the disk (``fdatasync``). So it is there after a power cut of all nodes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np

from ..errors import CorruptSlot, MlflashError, text_of
from ..state.layout import CHECK_NBYTES, PAGE_NBYTES, Extents, round_up
from ..state.rebuild import Read
from ..text import show_seconds
from .node_directory import NodeDirectory
from .slot import HEADER_NBYTES, Header, Incoming, Slot, Use, unpack

log = logging.getLogger("mlflash")

_LANES = 8  # buffers of one transfer: runs that arrive, or are being written
_PIECE_NBYTES = 4 << 20
MOST_BUSY = 0.8  # of the time between saves, that a disk may be written
_SLOW_SAVES = 3  # that take more, one after the other, before that is said


class Disk:
    """The directory of this job on a disk of this node.

    Attributes:
        problem: why nothing more is written to it; "": it is used.
    """

    def __init__(self, directory: NodeDirectory):
        self.directory, self.problem = directory, ""
        self.lanes = deque(aligned(PAGE_NBYTES) for _ in range(_LANES))  # free buffers
        self._busy = threading.Lock()
        self._writing, self._since, self._busy_s = 0, 0.0, 0.0  # writers now, since when, and seconds with any
        self._save_at, self._busy_before, self._slow_saves = 0.0, 0.0, 0

    def fail(self, error: OSError | MlflashError) -> None:
        """Note that the disk cannot be used any more."""
        if not self.problem:
            self.problem = getattr(error, "strerror", None) or text_of(error)
            log.warning("%s is not used any more (%s): from the next save on, the copies that this rank holds are in "
                        "memory", self.directory.path, self.problem)  # fmt: skip

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Count the time of a block as one in which the disk is written. Any thread."""
        with self._busy:
            self._since = self._since if self._writing else time.perf_counter()
            self._writing += 1
        try:
            yield
        finally:
            with self._busy:
                self._writing -= 1
                self._busy_s += 0.0 if self._writing else time.perf_counter() - self._since

    def saved(self, begun_s: float) -> None:
        """Warn once if saves come faster than this disk takes them; ``begun_s``: when one began (time.perf_counter)."""
        every_s, takes_s = begun_s - self._save_at, self._busy_s - self._busy_before
        is_slow = bool(self._save_at) and takes_s > MOST_BUSY * every_s
        self._save_at, self._busy_before = begun_s, self._busy_s
        self._slow_saves = self._slow_saves + 1 if is_slow else 0
        if self._slow_saves == _SLOW_SAVES:
            log.warning("%s is written for %s in each save, and saves come every %s: training waits for this disk. It "
                        "can do one every %s", self.directory.path, show_seconds(takes_s), show_seconds(every_s),
                        show_seconds(takes_s / MOST_BUSY))  # fmt: skip

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Let an error of the disk end a block, and note it. The directory has its own errors for some of them."""
        try:
            yield
        except (OSError, MlflashError) as error:
            self.fail(error)


class DiskFile:
    """An open slot file on a disk. Its methods raise OSError; opening it, what `NodeDirectory.open` raises, too.

    Args:
        name: of the file; "": a new one.
    """

    def __init__(self, directory: NodeDirectory, name: str = ""):
        if name:
            self.name, self._fd = name, directory.open(name, os.O_RDWR)
        else:
            self.name, self._fd = directory.new_slot_name()
            os.fsync(directory.fd)  # so that the file has its name after a power cut
        self._is_direct = True
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) | os.O_DIRECT)
        except OSError:  # the file system does not have it
            self._is_direct = False

    @property
    def nbytes(self) -> int:
        return os.fstat(self._fd).st_size

    @property
    def inode(self) -> int:
        return os.fstat(self._fd).st_ino

    @property
    def is_gone(self) -> bool:
        """Whether somebody has removed the file."""
        return not os.fstat(self._fd).st_nlink

    def read(self, start: int, nbytes: int) -> np.ndarray:
        """Read ``(nbytes,)`` uint8 from ``start`` on, which is a multiple of a page."""
        buffer, got = aligned(nbytes), 0
        while got < nbytes:
            more = os.preadv(self._fd, [buffer[got:].data], start + got)
            got += more
            if not more or (got < nbytes and got % PAGE_NBYTES):
                raise OSError(errno.EIO, "a file is shorter than it says")
        self._forget(start, nbytes)
        return buffer[:nbytes]

    def write(self, start: int, pages: np.ndarray) -> None:
        """Write whole pages, as `aligned` makes them, from ``start`` on, which is a multiple of a page."""
        done = 0
        while done < pages.nbytes:
            done += os.pwritev(self._fd, [pages[done:].data], start + done)

    def sync(self) -> None:
        """Return when all that was written is on the disk."""
        os.fdatasync(self._fd)
        self._forget(0, 0)

    def _forget(self, start: int, nbytes: int) -> None:
        if not self._is_direct:
            os.posix_fadvise(self._fd, start, nbytes, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the file; it stays. May be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def aligned(nbytes: int) -> np.ndarray:
    """Make zeros that O_DIRECT can read and write, ``nbytes`` rounded up to whole pages."""
    return np.frombuffer(mmap.mmap(-1, max(PAGE_NBYTES, round_up(nbytes, PAGE_NBYTES))), dtype=np.uint8)


class DiskSlot(Slot):
    """A slot on a disk. What cannot be read counts as damaged, and nothing more is written to such a disk."""

    def __init__(self, disk: Disk, name: str = ""):
        super().__init__()
        self._disk = disk
        self._file: DiskFile | None = None
        if name:
            with disk.watched():
                self._file = DiskFile(disk.directory, name)
        self.header = self.stored_header()

    # Where it is

    @property
    def name(self) -> str:
        return "" if self._file is None else self._file.name

    @property
    def nbytes(self) -> int:
        return 0 if self._file is None else self._file.nbytes

    @property
    def inode(self) -> int:
        return 0 if self._file is None else self._file.inode

    @property
    def is_gone(self) -> bool:
        return self._file is not None and self._file.is_gone

    def lacks(self, nbytes: int) -> bool:
        """Its file is made, and becomes larger, when it is written."""
        return False

    def unmap(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self.header = None, None

    # Reading

    def _read(self, start: int, nbytes: int) -> np.ndarray:
        """Read bytes; zeros if they cannot be read, which match no checksum."""
        if self._file is not None:
            with self._disk.watched():
                return self._file.read(start, nbytes)
        return np.zeros(nbytes, dtype=np.uint8)

    def first_page(self) -> bytes:
        return self._read(0, PAGE_NBYTES).tobytes()

    def stored_header(self) -> Header | None:
        try:
            header = unpack(self.first_page()[:HEADER_NBYTES])
        except CorruptSlot:
            return None
        return header if header.extents.nbytes <= self.nbytes else None

    def table(self, extents: Extents) -> np.ndarray:
        return self._read(extents.table_start, extents.blocks * CHECK_NBYTES).view("<u8")

    def run(self, extents: Extents, first: int, last: int) -> np.ndarray:
        where = extents.run(first, last)
        return self._read(PAGE_NBYTES + where.start, where.stop - where.start)

    def body(self, extents: Extents) -> np.ndarray:
        return self.run(extents, 0, extents.blocks)

    def reader(self, extents: Extents | None = None) -> Read:
        if extents is None:
            assert self.header is not None
            extents = self.header.extents
        of = extents
        return lambda entry: self.part(of, entry.start, entry.start + entry.nbytes)

    def part(self, extents: Extents, first: int, last: int) -> np.ndarray:
        at = extents.payload_start + first
        begin = at - at % PAGE_NBYTES
        return self._read(begin, extents.payload_start + last - begin)[at - begin :]

    def read_into(self, view: np.ndarray) -> None:
        """Read the whole file; the header comes last, so that nobody takes a part for the whole."""
        nbytes = self.nbytes
        for at in range(PAGE_NBYTES, nbytes, _PIECE_NBYTES):
            end = min(at + _PIECE_NBYTES, nbytes)
            view[at:end] = self._read(at, end - at)
        view[:PAGE_NBYTES] = self._read(0, PAGE_NBYTES)

    # Writing

    def unseal(self) -> None:
        self.header, self.use = None, Use.BUSY
        with self._disk.watched():
            if self._file is None or self._file.is_gone:
                self.unmap()
                self._file = DiskFile(self._disk.directory)
            self._file.write(0, aligned(PAGE_NBYTES))

    def seal(self, header: Header) -> None:
        if self._write_in_page(0, np.frombuffer(header.pack(), dtype=np.uint8)):
            self.header = header

    def _write_record(self, start: int, record: bytes) -> None:
        self._write_in_page(start, np.frombuffer(record, dtype=np.uint8))

    def _write_in_page(self, start: int, content: np.ndarray) -> bool:
        """Write something into the first page, and return whether it is on the disk."""
        with self._disk.watched(), self._disk.writing():
            if self._file is not None:
                page = aligned(PAGE_NBYTES)
                page[:] = self._file.read(0, PAGE_NBYTES)
                page[start : start + content.nbytes] = content
                self._file.write(0, page)
                self._file.sync()
                return True
        return False

    def incoming(self, extents: Extents) -> Incoming:
        return _Incoming(self._disk, self._file, extents)

    def workplace(self, extents: Extents) -> Slot:
        return _InMemory(extents)

    def store(self, made: Slot) -> Callable[[], bool | None]:
        writer, pages = _Writer(self._disk, self._file), made.view
        for at in range(PAGE_NBYTES, pages.nbytes, _PIECE_NBYTES):
            writer.write(at, pages[at : at + _PIECE_NBYTES])
        writer.end()
        return lambda: writer.is_good


class _Writer:
    """Writes pages of a file, in their order, on a thread of its own."""

    def __init__(self, disk: Disk, file: DiskFile | None):
        self._disk, self._file, self._is_good = disk, file, file is not None and not disk.problem
        self._todo: queue.SimpleQueue[tuple[int, np.ndarray, Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="mlflash-disk", daemon=True)
        self._thread.start()

    def write(self, start: int, pages: np.ndarray, then: Callable[[], None] = lambda: None) -> None:
        """Write pages from ``start`` on; then call ``then``, also after an error."""
        self._todo.put((start, pages, then))

    def end(self) -> None:
        """Write no more; what was written goes to the disk."""
        self._todo.put(None)

    @property
    def is_good(self) -> bool | None:
        """Whether all is on the disk; None: that is not known yet."""
        return None if self._thread.is_alive() else self._is_good

    def _run(self) -> None:
        while (work := self._todo.get()) is not None:
            start, pages, then = work
            self._try(lambda file, start=start, pages=pages: file.write(start, pages))  # type: ignore[misc]
            then()
        self._try(DiskFile.sync)

    def _try(self, work: Callable[[DiskFile], None]) -> None:
        if self._is_good and self._file is not None:
            self._is_good = False
            with self._disk.watched(), self._disk.writing():
                work(self._file)
                self._is_good = True


class _Incoming(Incoming):
    """Runs of blocks arrive in buffers, and are written while others arrive."""

    def __init__(self, disk: Disk, file: DiskFile | None, extents: Extents):
        self._extents, self._lanes, self._writer = extents, disk.lanes, _Writer(disk, file)
        self._table = aligned(extents.blocks * CHECK_NBYTES)
        self.table = self._table[: extents.blocks * CHECK_NBYTES].view("<u8")
        self._at: dict[int, tuple[np.ndarray, int]] = {}

    def place(self, first: int, last: int) -> np.ndarray | None:
        try:
            lane = self._lanes.popleft()
        except IndexError:
            return None
        where = self._extents.run(first, last)
        nbytes = where.stop - where.start
        if lane.nbytes < nbytes:
            lane = aligned(nbytes)
        self._at[first] = lane, nbytes
        return lane[:nbytes]

    def run(self, first: int, last: int) -> np.ndarray:
        lane, nbytes = self._at[first]
        return lane[:nbytes]

    def keep(self, first: int, last: int) -> None:
        lane, nbytes = self._at.pop(first)
        lane[nbytes:] = 0
        start = PAGE_NBYTES + self._extents.block(first).start
        self._writer.write(start, lane[: round_up(nbytes, PAGE_NBYTES)], lambda: self._lanes.append(lane))

    def end(self) -> None:
        self._writer.write(self._extents.table_start, self._table)
        self._writer.end()

    @property
    def is_good(self) -> bool | None:
        return self._writer.is_good


class _InMemory(Slot):
    """What is made in memory before it is stored on a disk."""

    def __init__(self, extents: Extents):
        super().__init__()
        self._made = aligned(extents.nbytes)

    @property
    def view(self) -> np.ndarray:
        return self._made
