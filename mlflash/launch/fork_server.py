"""Forks couriers from a process that has imported what they need, in milliseconds, and notices how they end.

The process has one thread, never initializes MPI, and never imports torch: what it imports once, all couriers of its
node share.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import importlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from ..errors import UnsafePath
from . import courier_mpi
from .courier_mpi import SegmentRecord
from .courier_process import NOT_UP, Courier, CourierEnd, Inherited, run
from .lines import BadLine, Lines
from .pmi_server import NodeEpoch, PmiServer, numbered

Entry = Callable[[Courier], object]
ENDS_S = 6.0
"""Limit for a courier to end after its trainer: it gives up what is left after 4 s, and a new run waits 8 s for it."""
_LARGEST_NBYTES = 1 << 20  # of a courier's report
_COLLECT_EVERY = 8  # couriers: after a `gc.unfreeze`, Python itself hardly ever looks for cycles of what was there


class Refused(Exception):
    """Something that cannot be done; the text says why."""


@dataclasses.dataclass(frozen=True)
class Order:
    """What a courier is forked for."""

    entry: str
    epoch: str  # the name of its world
    rank: int
    nodes: Sequence[int]  # of each rank, any numbers
    reads: bool  # whether on each node all ranks can read each other's memory (`courier_mpi`)
    cores: frozenset[int]  # on which it runs if possible; empty: those of its trainer
    up_s: float  # how long it may take to initialize MPI
    inherited: Inherited


class ForkedCourier:
    """A courier that runs, or was not reaped yet.

    ``up``: called when its MPI is initialized. ``ended``: called once, at its end.
    """

    def __init__(self, pid: int, order: Order, pmi: PmiServer | None, reports_fd: int, segments: set[str],
                 up: Callable[[], None], ended: Callable[[CourierEnd], None]):  # fmt: skip
        self.pid, self.segments = pid, segments
        self.is_up = pmi is None
        self.why: str | None = None
        self.end: CourierEnd | None = None
        self._pmi, self._reports_fd, self._reports = pmi, reports_fd, Lines(_LARGEST_NBYTES)
        self._up, self._ended = up, ended
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._pidfd = os.pidfd_open(pid)
        self._loop.add_reader(self._pidfd, self._reap)
        self._loop.add_reader(reports_fd, self._hear)
        if pmi is not None:
            fd = pmi.fileno()
            pmi.closing = lambda: self._lose_pmi(pmi, fd)
            self._loop.add_reader(fd, pmi.receive)
            self._timer = self._loop.call_later(order.up_s, self.kill, f"{NOT_UP} {order.up_s:g} s after it was forked")

    def kill(self, why: str | None = None) -> None:
        """Kill it. ``why``: a reason for the report of its end, if there is none yet."""
        self.why = self.why or why
        self.segments |= courier_mpi.mapped_by(self.pid)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def end_within(self, seconds: float, why: str) -> None:
        """Kill it if it has not ended by itself after so many seconds, which begin when its MPI is up.

        Before that its MPI has its own limit.
        """
        if not self.is_up:
            self._up = lambda: self.end_within(seconds, why)
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self.kill, why)

    def _lose_pmi(self, pmi: PmiServer, fd: int) -> None:
        self._loop.remove_reader(fd)  # before another descriptor has this number
        if pmi.error is not None and self.why is None:
            self.kill(pmi.error)

    def _hear(self) -> None:
        """Process a courier's only report: that MPI is up."""
        try:
            reported = os.read(self._reports_fd, 1 << 16)
        except BlockingIOError:
            return
        if not reported:
            self._loop.remove_reader(self._reports_fd)
            return
        try:
            for report in self._reports.add(reported):
                self.segments |= {name for name in report["mapped"] if courier_mpi.is_segment(name)}
                self.is_up = True
                if self._timer is not None:
                    self._timer.cancel()
                self._up()
        except (BadLine, KeyError, TypeError) as error:
            self.kill(f"it reported {error!r}")

    def _reap(self) -> None:
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._hear()
        for fd in (self._pidfd, self._reports_fd):
            self._loop.remove_reader(fd)
            os.close(fd)
        if self._timer is not None:
            self._timer.cancel()
        if self._pmi is not None:
            self._pmi.close()
        why = self.why or (self._pmi.error if self._pmi is not None else None)
        self.end = CourierEnd(status if status >= 0 else None, -status if status < 0 else None, why)
        self._ended(self.end)


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Set variables for a moment: ranks inherit the environment of this process."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


class ForkServer:
    """The couriers of a node. Close it when the last one has ended."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._vendor: str | None = None
        self.mpi_environment: dict[str, str] = {}  # the variable for couriers that says which MPI they have
        self._ended = 0  # couriers
        self._used: set[tuple[str, int]] = set()  # epochs and ranks that had a courier
        self._segments: set[str] = set()  # of killed couriers; other processes still map them
        self._record: SegmentRecord | None = None  # for whoever finds them if this process is killed, too

    def prepare(self, entry: str, with_mpi: bool) -> str:
        """Import everything that couriers will need; return the MPI that they will load, as mpi4py names it, or "".

        Raises:
            Refused: an import fails, has initialized MPI or imported torch.
        """
        try:
            with _environment(OPENBLAS_NUM_THREADS="1"):  # a process with threads must not fork
                import numpy  # noqa: F401
            if with_mpi and self._vendor is None:
                self._import_mpi()
            if entry not in self._entries:
                module, _, function = entry.partition(":")
                self._entries[entry] = getattr(importlib.import_module(module), function)
        except Exception as error:
            raise Refused(f"{type(error).__name__}: {error}") from error
        mpi: Any = sys.modules.get("mpi4py.MPI")
        if (mpi is not None and mpi.Is_initialized()) or "torch" in sys.modules:
            raise Refused(f"importing {entry} has initialized MPI or imported torch")
        return self._vendor or "" if with_mpi else ""

    def _import_mpi(self) -> None:
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        library = courier_mpi.library_of(os.environ)
        self.mpi_environment = {} if library is None else {courier_mpi.CHOSEN: library}
        with _environment(**self.mpi_environment):
            from mpi4py import MPI
        self._vendor = MPI.get_vendor()[0]

    def fork(self, order: Order, epoch: NodeEpoch | None, up: Callable[[], None], ended: Callable[[CourierEnd], None]
             ) -> ForkedCourier:  # fmt: skip
        """Fork a courier. ``epoch``: in which it initializes MPI; None: it has no MPI, and its world is one rank.

        Raises Refused, or OSError.
        """
        if (order.epoch, order.rank) in self._used:
            raise Refused(f"the name {order.epoch} was used before: MPI_Init would hang")
        threads = len(os.listdir("/proc/self/task"))
        if threads != 1:
            raise Refused(f"the agent has {threads} threads, and only one of them would be in the courier")
        self._used.add((order.epoch, order.rank))
        self._segments = courier_mpi.remove_unmapped(self._segments)
        node = numbered(order.nodes)[order.rank]
        segments = courier_mpi.named_after(order.epoch, node) if epoch is not None else set[str]()
        if segments:
            self._note(segments)
        with contextlib.ExitStack() as opened, contextlib.ExitStack() as kept:
            reports_fd, reporting_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            kept.callback(os.close, reports_fd)
            opened.callback(os.close, reporting_fd)
            pmi, pmi_socket = None, None
            if epoch is not None:
                server_socket, pmi_socket = socket.socketpair()
                opened.callback(pmi_socket.close)
                kept.callback(server_socket.close)
                pmi = PmiServer(server_socket, epoch)
            pid = self._fork(order, reporting_fd, pmi_socket)
            try:
                courier = ForkedCourier(pid, order, pmi, reports_fd, segments, up,
                                        lambda end: self._forget(courier, ended, end))  # fmt: skip
            except BaseException:  # there is no descriptor for its pidfd, say
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                raise
            kept.pop_all()
        return courier

    def _fork(self, order: Order, reporting_fd: int, pmi_socket: socket.socket | None) -> int:
        me = os.getpid()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        gc.freeze()  # if the courier collected these objects, it would close its own descriptors
        pid = os.fork()
        if pid == 0:
            inherited = order.inherited
            courier = Courier(order.epoch, order.rank, tuple(order.nodes), inherited.channel, inherited.trainer_pidfd,
                              reporting_fd, pmi_socket is not None, inherited.cores, order.cores)  # fmt: skip
            run(self._entries[order.entry], courier, inherited, pmi_socket, me, order.reads)
        gc.unfreeze()
        return pid

    def _forget(self, courier: ForkedCourier, ended: Callable[[CourierEnd], None], end: CourierEnd) -> None:
        self._segments = courier_mpi.remove_unmapped(self._segments | courier.segments)
        ended(end)
        self._ended += 1
        if self._ended % _COLLECT_EVERY == 0:
            gc.collect()

    def _note(self, segments: Collection[str]) -> None:
        """Write down what a courier may leave. Without a directory for that, it is left if all are killed."""
        with contextlib.suppress(OSError, UnsafePath):
            if self._record is None:
                self._record = SegmentRecord(courier_mpi.SHARED_MEMORY / f"mlflash-{os.geteuid()}")
            self._record.add(segments)

    def close(self) -> None:
        """Remove what couriers have left, as far as nobody maps it."""
        courier_mpi.remove_unmapped(self._segments)
        if self._record is not None:
            self._record.close()
