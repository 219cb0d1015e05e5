"""The zygote: a process next to each trainer that has imported numpy and MPI, and forks couriers in milliseconds.

`zygote_client` starts ``python -m mlflash.wireup.zygote FD TRAINER_PID MPI MODULE:FUNCTION...``, with a socket to the
trainer; MPI is ``mpi`` or ``no-mpi``. If a `zygote_host` starts it, the second argument is ``TRAINER_PID:PIDFD``.

It has one thread, never initializes MPI, and never imports torch. In couriers it only runs the given functions. It ends
when it is told to or when its trainer has ended, but not before the last courier. Then it tells all ranks that this one
has left the job (`epoch_agreement.Departure`), unless ``tells`` of the order to end is false. It notices a trainer's
end by a pidfd, because forked children of the trainer may hold the socket open.

Messages are those of `frames`. The trainer sends orders and gets one answer to each, in order: ``"error": text``, or
the answer in this table.

| ``{"do": ...}`` | more fields                                      | the answer                              |
|-----------------|--------------------------------------------------|-----------------------------------------|
| ``"serve"``     | ``host`` ``port`` ``token`` ``ranks``            | ``host``, ``port``, ``token``           |
| ``"fork"``      | ``epoch`` ``rank`` ``nodes`` ``store`` ``token`` | ``pid``, when it is forked              |
|                 | ``entry`` ``up_s`` ``cores`` ``reads``; one      |                                         |
|                 | descriptor, by SCM_RIGHTS                        |                                         |
| ``"ask"``       | ``pid``                                          | ``running``, ``mpi`` (whether it is up) |
| ``"vendor"``    |                                                  | ``vendor``: of MPI, "" without          |
| ``"kill"``      | ``pid``                                          | the same, from before                   |
| ``"end"``       | ``tells``                                        | nothing; no courier is forked after it  |

After ``serve`` it serves the key-value store of ``ranks`` ranks, at an address of this machine, until it ends. With
port 0 and token null it chooses both.

``nodes`` is a list of the node of each rank, ``store`` is host (numeric) and port, and ``entry`` is one of the given
functions. A courier that has not initialized MPI ``up_s`` seconds after its fork is killed, because it may wait for
ranks that never come. One that has not ended `ENDS_S` seconds after its trainer, or after its later MPI_Init, is
killed, too, because it has the job's lock. It runs on ``cores`` if possible; null means the cores of its zygote. If
``reads`` is false, its MPI does not read the memory of other processes (`cross_memory`). If ``store`` is null, the
courier has no MPI, and its world is one rank.

Two messages are no answers: ``{"event": "up", "pid": ...}`` when a courier's MPI is initialized, and
``{"event": "ended", "pid", "epoch", "rank", "status", "signal", "why"}`` at a courier's end. Either the exit status or
the number of the signal is null; ``why`` is why the zygote killed it, or null.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

from ..errors import UnsafePath
from . import courier_process, mpi_library, mpich_segments
from .courier_process import Courier
from .epoch_agreement import Departure, Farewell, departed_key, needed_until_up, number_of
from .frames import BadFrame, Frames, pack, send_ready
from .key_value_store import KeyValueStore, listen
from .mpich_segments import SegmentRecord
from .own_process import allow
from .pmi_server import PmiServer
from .process_mapping import numbered
from .store_client import StoreClient
from .strangers import MOST

Entry = Callable[[Courier], object]
NOT_UP = "MPI was not up"
"""How the text begins why a courier was killed in MPI_Init."""
ENDS_S = 6.0
"""Limit for a courier to end after its trainer: it gives up what is left after 4 s, and a new run waits 8 s for it."""
_LARGEST_NBYTES = 1 << 23
_ASKED_S = 5.0  # below the time that a trainer gives its zygote to end
# Each rank has two connections to the store, from its trainer and its courier, and a third while it shares a text. The
# rest is for unknown connections and for forks.
_DESCRIPTORS_PER_RANK, _OTHER_DESCRIPTORS = 3, 192


def import_all(entries: list[str], with_mpi: bool) -> dict[str, Entry]:
    """Import everything that couriers will need; return their entry points by name.

    Raises:
        RuntimeError: an import has initialized MPI or imported torch.
    """
    import numpy  # noqa: F401

    initialised: Callable[[], bool] = lambda: False
    if with_mpi:
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        if (library := mpi_library.choose(os.environ)) is not None:
            os.environ["MPI4PY_LIBMPI"] = library
        from mpi4py import MPI

        initialised = MPI.Is_initialized

    found = {}
    for entry in entries:
        module, _, function = entry.partition(":")
        found[entry] = getattr(importlib.import_module(module), function)
    if initialised() or "torch" in sys.modules:
        raise RuntimeError(f"importing {', '.join(entries)} has initialized MPI or imported torch")
    return found


def vendor() -> str:
    """The MPI implementation that was loaded, as mpi4py names it. Not collective; MPI need not be initialized."""
    name: str = sys.modules["mpi4py.MPI"].get_vendor()[0]
    return name


@dataclasses.dataclass
class ForkedCourier:
    """A courier that still runs, or was not reaped yet."""

    pid: int
    pidfd: int
    epoch: str
    rank: int
    mpi: tuple[PmiServer, StoreClient] | None  # over which it starts MPI; None without MPI
    up_s: float  # how long it may take to initialize MPI
    reports_fd: int  # a pipe from it
    reports: Frames  # what came over the pipe
    segments: set[str]  # shared memory that it may leave behind
    reports_more: bool = True
    is_up: bool = False
    up_at: float = 0.0  # by time.monotonic
    why: str | None = None  # why the zygote killed it
    forked_at: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def error(self) -> str | None:
        return self.mpi[0].error if self.mpi is not None else None

    def close(self) -> None:
        for one in self.mpi or ():
            one.close()
        os.close(self.pidfd)
        os.close(self.reports_fd)


class _Refused(Exception):
    """A command that cannot be carried out."""


class Zygote:
    """The process: `run` is its loop. ``entries``: the functions that a courier may run, by name."""

    def __init__(self, sock: socket.socket, trainer_pidfd: int, entries: dict[str, Entry], has_mpi: bool = True):
        self._sock, self._trainer_pidfd, self._entries, self._has_mpi = sock, trainer_pidfd, entries, has_mpi
        self._frames = Frames(_LARGEST_NBYTES)
        self._unsent = bytearray()
        self._descriptors: deque[int] = deque()  # received, and not yet used by a fork
        self._children: dict[int, ForkedCourier] = {}
        self._used: set[tuple[str, int]] = set()  # epochs and ranks that had a courier
        self._segments: set[str] = set()  # of killed couriers; other processes still map them
        self._record: SegmentRecord | None = None  # for whoever finds them if this process is killed, too
        self._store: KeyValueStore | None = None  # the store that this zygote serves
        self._trainer_ended: float | None = None  # by time.monotonic
        self._hears = True
        self._is_ending, self._tells = False, True
        self._newest: dict[str, Any] | None = None  # the order of the courier that was forked last
        self._farewell: Farewell | None = None
        self._asked_until: float | None = None  # by time.monotonic
        sock.setblocking(False)

    def run(self) -> None:
        """Do what the trainer asks, until it and all couriers have ended."""
        while (self._children or not (self._is_ending or self._trainer_ended is not None) or self._takes_leave()
               or self._asked_for_s() > 0):  # fmt: skip
            for act in self._ready():
                act()
            for child in list(self._children.values()):
                if child.error is not None and child.why is None:
                    self._kill(child, child.error)
            for child, left_s, why in self._limits():
                if left_s <= 0:
                    self._kill(child, why)
        mpich_segments.remove_unmapped(self._segments)
        if self._record is not None:
            self._record.close()
        if self._trainer_ended is None and self._unsent:
            self._sock.settimeout(1.0)
            self._flush()
        if self._farewell is not None:
            self._farewell.store.close()
        if self._store is not None:
            self._store.close()

    def _takes_leave(self) -> bool:
        """Tell all ranks that this one has left, if nobody else has. Return whether this is still under way."""
        if not self._tells or self._newest is None or self._newest["store"] is None:
            return False
        if self._farewell is None:
            store = StoreClient(tuple(self._newest["store"]), self._newest["token"])
            departure = Departure(self._newest["rank"], "its process has ended", ends_job=False)
            self._farewell = Farewell(store, departure, number_of(self._newest["epoch"]))
        return self._farewell.left_s > 0

    def _asked_for_s(self) -> float:
        """How long this zygote's store stays for ranks that have not asked yet why this one has left, in seconds."""
        if self._store is None or self._newest is None or not self._is_ending or self._tells:
            return 0.0
        own = departed_key(number_of(self._newest["epoch"]), self._newest["rank"])
        others = self._store.connections - (self._trainer_ended is None)
        if self._store.look(own) != "" or others <= 0:
            return 0.0
        self._asked_until = self._asked_until or time.monotonic() + _ASKED_S
        return max(0.0, self._asked_until - time.monotonic())

    def _limits(self) -> list[tuple[ForkedCourier, float, str]]:
        """Couriers that must reach something, with the seconds that each has left, and why it is killed then."""
        now, found = time.monotonic(), []
        for child in self._children.values():
            if child.why is not None:
                continue
            if child.mpi is not None and not child.is_up:
                end, why = child.forked_at + child.up_s, f"{NOT_UP} {child.up_s:g} s after it was forked"
            elif self._trainer_ended is not None:
                end, why = max(self._trainer_ended, child.up_at) + ENDS_S, f"its trainer ended {ENDS_S:g} s ago"
            else:
                continue
            found.append((child, end - now, why))
        return found

    def _ready(self) -> list[Callable[[], None]]:
        """Wait, and return what to do."""
        watched: dict[int, Callable[[], None]] = {}
        poll = select.poll()  # a new one each time, so that couriers inherit none

        def watch(fd: int, events: int, act: Callable[[], None]) -> None:
            if fd >= 0 and events:
                poll.register(fd, events)
                watched[fd] = act

        if self._trainer_ended is None:
            watch(self._trainer_pidfd, select.POLLIN, self._lose_trainer)
            events = (select.POLLIN if self._hears else 0) | (select.POLLOUT if self._unsent else 0)
            watch(self._sock.fileno(), events, self._talk)
        for child in self._children.values():
            # Handle the end of a courier first: then what it has reported is read, too.
            watch(child.pidfd, select.POLLIN, functools.partial(self._reap, child))
            watch(child.reports_fd, select.POLLIN if child.reports_more else 0, functools.partial(self._hear, child))
            if child.mpi is not None:
                pmi, store = child.mpi
                watch(pmi.fileno(), select.POLLIN, pmi.receive)
                watch(store.fileno(), store.events, store.step)
        if self._store is not None:
            watch(self._store.fileno(), select.POLLIN, self._store.step)
        waits = [left_s for _, left_s, _ in self._limits()]
        if self._farewell is not None:
            store = self._farewell.store
            watch(store.fileno(), store.events, store.step)
            waits.append(self._farewell.left_s)
        if (asked_s := self._asked_for_s()) > 0:
            waits.append(asked_s)
        first = min(waits, default=None)
        return [watched[fd] for fd, _ in poll.poll(None if first is None else max(0.0, first) * 1000)]

    # The trainer

    def _lose_trainer(self) -> None:
        self._trainer_ended = time.monotonic()

    def _talk(self) -> None:
        self._flush()
        try:
            received, descriptors, _, _ = socket.recv_fds(self._sock, 1 << 16, 16)
        except BlockingIOError:
            return
        except OSError:
            received, descriptors = b"", []
        self._descriptors.extend(descriptors)
        if not received:  # nobody can ask for anything any more
            self._hears, self._is_ending = False, True
            return
        self._frames.add(received)
        try:
            for message in self._frames.messages():
                self._tell(self._obey(message))
        except BadFrame as error:
            print(f"mlflash zygote: the trainer sent {error}", file=sys.stderr)
            self._hears, self._is_ending = False, True

    def _tell(self, message: dict[str, Any]) -> None:
        self._unsent += pack(message)
        self._flush()

    def _flush(self) -> None:
        try:
            send_ready(self._sock, self._unsent)
        except OSError:  # the trainer has gone
            self._unsent.clear()

    def _obey(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            match message["do"]:
                case "fork":
                    return {"pid": self._fork(message)}
                case "serve":
                    return self._serve(message["host"], message["port"], message["token"], message["ranks"])
                case "vendor":
                    return {"vendor": vendor() if self._has_mpi else ""}
                case "end":
                    self._is_ending, self._tells = True, message["tells"]
                    return {}
            child = self._children.get(message["pid"])
            if message["do"] == "kill" and child is not None:
                self._kill(child, None)
            return {"running": child is not None, "mpi": child is not None and child.is_up}
        except _Refused as refused:
            return {"error": str(refused)}
        except OSError as error:
            return {"error": f"it could not {message['do']}: {error}"}

    # The key-value store

    def _serve(self, host: str, port: int, token: str | None, ranks: int) -> dict[str, Any]:
        if self._store is None:
            if why_not := allow(_DESCRIPTORS_PER_RANK * ranks + _OTHER_DESCRIPTORS):
                raise _Refused(f"the key-value store of rank 0 {why_not}")
            # All ranks connect at once, and those that were forked first send their token last.
            self._store = KeyValueStore(listen(host, port), token, MOST + _DESCRIPTORS_PER_RANK * ranks)
        host, port = self._store.address
        return {"host": host, "port": port, "token": self._store.token}

    # Couriers

    def _fork(self, order: dict[str, Any]) -> int:
        with socket.socket(fileno=self._descriptors.popleft()) as trainer:
            epoch, rank = order["epoch"], order["rank"]
            if self._is_ending:
                raise _Refused("it was told to end")
            if (epoch, rank) in self._used:
                raise _Refused(f"the name {epoch} was used before: MPI_Init would hang")
            threads = len(os.listdir("/proc/self/task"))
            if threads != 1:
                raise _Refused(f"it has {threads} threads, and only one of them would be in the courier")
            self._used.add((epoch, rank))
            mpich_segments.remove_unmapped(self._segments)
            self._newest = order
            return self._fork_checked(order, trainer)

    def _fork_checked(self, order: dict[str, Any], trainer: socket.socket) -> int:
        epoch, rank, nodes = order["epoch"], order["rank"], tuple(order["nodes"])
        zygote_pid = os.getpid()
        segments = set() if order["store"] is None else mpich_segments.named_after(epoch, numbered(nodes)[rank])
        if segments:
            self._note(segments)
        with contextlib.ExitStack() as opened:
            ours, its = socket.socketpair() if order["store"] is not None else (None, None)
            if its is not None:
                opened.callback(its.close)
            reports_fd, reporting_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            opened.callback(os.close, reporting_fd)
            with contextlib.ExitStack() as kept:
                kept.callback(os.close, reports_fd)
                mpi = None
                if ours is not None:
                    kept.callback(ours.close)
                    store = StoreClient((order["store"][0], order["store"][1]), order["token"])
                    kept.callback(store.close)
                    mpi = (PmiServer(ours, epoch, rank, nodes, store), store)
                gc.freeze()  # if the courier collected these objects, it would close its own descriptors
                pid = os.fork()
                if pid == 0:
                    courier = Courier(epoch, rank, nodes, trainer, self._trainer_pidfd, reporting_fd, mpi is not None,
                                      frozenset(os.sched_getaffinity(0)), frozenset(order["cores"] or ()))  # fmt: skip
                    courier_process.run(self._entries[order["entry"]], courier, its, zygote_pid, order["reads"])
                gc.unfreeze()
                try:
                    pidfd = os.pidfd_open(pid)
                except OSError:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    raise
                kept.pop_all()
        self._children[pid] = ForkedCourier(
            pid, pidfd, epoch, rank, mpi, order["up_s"], reports_fd, Frames(_LARGEST_NBYTES), segments
        )
        return pid

    def _note(self, segments: set[str]) -> None:
        """Write down what a courier may leave. Without a directory for that, it is left if all are killed."""
        with contextlib.suppress(OSError, UnsafePath):
            if self._record is None:
                self._record = SegmentRecord(mpich_segments.SHARED_MEMORY / f"mlflash-{os.geteuid()}")
            self._record.add(segments)

    def _kill(self, child: ForkedCourier, why: str | None) -> None:
        child.why = child.why or why
        child.segments |= mpich_segments.mapped_by(child.pid)
        try:
            signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def _hear(self, child: ForkedCourier) -> None:
        """Process a courier's only report: that MPI is up."""
        if child.pid not in self._children:
            return
        try:
            reported = os.read(child.reports_fd, 1 << 16)
            child.reports_more = bool(reported)
            child.reports.add(reported)
            for report in child.reports.messages():
                child.is_up, child.up_at = True, time.monotonic()
                if child.mpi is not None:
                    child.mpi[0].initialized(*needed_until_up(number_of(child.epoch)))
                child.segments |= {name for name in report["mapped"] if mpich_segments.is_segment(name)}
                self._tell({"event": "up", "pid": child.pid})
        except BlockingIOError:
            pass
        except (BadFrame, KeyError, TypeError) as error:
            self._kill(child, f"it reported {error!r}")

    def _reap(self, child: ForkedCourier) -> None:
        if child.pid not in self._children:
            return
        status = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
        self._hear(child)
        del self._children[child.pid]
        child.close()
        self._segments = mpich_segments.remove_unmapped(self._segments | child.segments)
        why = child.why or child.error
        self._tell({"event": "ended", "pid": child.pid, "epoch": child.epoch, "rank": child.rank, "why": why,
                    "status": status if status >= 0 else None, "signal": -status if status < 0 else None})  # fmt: skip


def main(arguments: list[str]) -> NoReturn:
    """Be the zygote of a trainer."""
    trainer_pid, _, passed = arguments[1].partition(":")
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the trainer may have blocked some signals
    courier_process.ignore_signals_of_the_step()
    if passed:  # by the host that started this zygote
        trainer_pidfd = int(passed)
        os.set_inheritable(trainer_pidfd, False)
    else:
        try:
            trainer_pidfd = os.pidfd_open(int(trainer_pid))
        except ProcessLookupError:
            sys.exit(0)
        except OSError as refused:
            sys.exit(f"mlflash: no process can be watched here (pidfd_open: {refused.strerror}): couriers "
                     "need Linux 5.3, and a container whose profile allows it")  # fmt: skip
        if os.getppid() != int(trainer_pid):  # it ended meanwhile, and this may be the pidfd of another process
            sys.exit(0)
    with socket.socket(fileno=int(arguments[0])) as sock:
        sock.set_inheritable(False)
        has_mpi = arguments[2] == "mpi"
        Zygote(sock, trainer_pidfd, import_all(arguments[3:], has_mpi), has_mpi).run()
    sys.exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
