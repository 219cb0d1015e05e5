"""A trainer's side of its zygote: start it, have couriers forked, wait for their ends."""

from __future__ import annotations

import array
import contextlib
import dataclasses
import os
import select
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from ..errors import DeadlineExceeded
from . import mpich_segments, zygote_host
from .frames import BadFrame, Frames, pack, receive_ready
from .interfaces import for_mpi
from .launcher_variables import without_launcher
from .process_mapping import numbered
from .zygote_host import SOCK, TRAINER

_LARGEST_NBYTES = 1 << 20


class ZygoteLost(ConnectionError):
    """The zygote has ended, and its couriers with it."""


class ZygoteRefused(OSError):
    """The zygote refuses to do what it was asked to do."""


@dataclasses.dataclass(frozen=True)
class CourierEnd:
    """How a courier ended."""

    pid: int
    epoch: str  # the name of its world
    rank: int
    status: int | None  # None after a signal
    signal: int | None  # None after an exit
    why: str | None  # why the zygote killed it; None if it did not


class ZygoteClient:
    """The zygote of this process. Stop it; it may be stopped twice.

    The constructor returns before the zygote has imported everything; the first courier waits for that. One thread uses
    it, and no process that was forked from this one. If there is a host of this job on this node (`zygote_host`), the
    host starts the zygote, and the zygote prints to where the host prints to.

    All calls raise ZygoteLost if it has ended, DeadlineExceeded if it has not answered, ZygoteRefused if it says why
    not.

    Args:
        entry_points: ``module:function`` of everything that a courier may run, importable without the trainer's script.
        environment: of the zygote, without the variables of a launcher; None: that of this process.
        output: where couriers print to; None: where this process prints to.
        mpi: whether couriers may initialize MPI. Without it no MPI needs to be installed.
    """

    def __init__(
        self,
        entry_points: Sequence[str],
        environment: Mapping[str, str] | None = None,
        output: IO[Any] | None = None,
        mpi: bool = True,
    ):
        self._owner = os.getpid()
        self._sock, its = socket.socketpair()
        self._frames = Frames(_LARGEST_NBYTES)
        self._answers: deque[dict[str, Any]] = deque()
        self._unanswered = 0  # of commands that were not waited for to the end
        self._up: set[int] = set()
        self._running: set[int] = set()
        self._segments: dict[int, set[str]] = {}  # that the couriers make
        self.left: set[str] = set()
        """Shared memory of its couriers that others still mapped when it was stopped (`mpich_segments`)."""
        self.ended: dict[int, CourierEnd] = {}
        """Couriers that have ended, as far as `step` has seen."""
        with contextlib.ExitStack() as failed, its:
            failed.callback(self._sock.close)
            given = os.environ if environment is None else environment
            command = [sys.executable, "-m", __package__ + ".zygote"]
            words = ["mpi" if mpi else "no-mpi", *entry_points]
            own = _paths(without_launcher(given)) | for_mpi(given)
            hosted = zygote_host.start(given, [*command, SOCK, TRAINER, *words], own, its.fileno())
            self.process: subprocess.Popen[bytes] | zygote_host.HostedProcess = hosted or subprocess.Popen(
                [*command, str(its.fileno()), str(self._owner), *words],
                env=own,
                pass_fds=[its.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # so that signals of a terminal or launcher to the trainer's group miss it
            )
            failed.pop_all()
        self._sock.setblocking(False)

    def fileno(self) -> int:
        """A descriptor that is readable when `step` has something to do."""
        return self._sock.fileno()

    @property
    def running(self) -> frozenset[int]:
        """The couriers that have not ended, as far as `step` has seen."""
        return frozenset(self._running)

    def is_up(self, pid: int) -> bool:
        """Whether a courier has initialized MPI, as far as `step` has seen."""
        return pid in self._up

    def serve(
        self, host: str, ranks: int, timeout_s: float, port: int = 0, token: str | None = None
    ) -> tuple[tuple[str, int], str]:
        """Have the zygote serve the key-value store of a job until it ends; return its address and token.

        Not collective: one rank of a job does it. A second call returns the same. ``port`` and ``token`` are those of a
        store whose zygote has ended. The first call also waits for the zygote's imports.
        """
        order = {"do": "serve", "host": host, "ranks": ranks, "port": port, "token": token}
        answer = self._ask(order, timeout_s)
        return (answer["host"], answer["port"]), answer["token"]

    def fork(
        self,
        entry_point: str,
        epoch: str,
        rank: int,
        nodes: Sequence[int],
        store: tuple[str, int] | None,
        token: str,
        descriptor: int,
        timeout_s: float,
        up_s: float | None = None,
        cores: Collection[int] | None = None,
        reads: bool = True,
    ) -> int:
        """Have a courier forked, and return its process number.

        Not collective, but its MPI_Init is, over all ranks of the epoch. The first call also waits for the zygote's
        imports.

        Args:
            store: numeric host and port of the key-value store; None for a courier that is alone, without MPI.
            descriptor: a socket; the courier gets a copy, so close yours.
            up_s: how long the courier may take to initialize MPI; None: ``timeout_s``.
            cores: the cores on which it runs if possible; None: those of the zygote.
            reads: whether on each node all ranks can read each other's memory (`cross_memory`).
        """
        order = {"do": "fork", "entry": entry_point, "epoch": epoch, "rank": rank, "nodes": list(nodes),
                 "store": None if store is None else list(store), "token": token,
                 "cores": None if cores is None else sorted(cores), "reads": reads,
                 "up_s": timeout_s if up_s is None else up_s}  # fmt: skip
        pid: int = self._ask(order, timeout_s, [descriptor])["pid"]
        if store is not None and pid in self._running:
            self._segments[pid] = mpich_segments.named_after(epoch, numbered(nodes)[rank])
        return pid

    def vendor(self, timeout_s: float) -> str:
        """The MPI implementation that couriers would load, as mpi4py names it; "" without MPI."""
        vendor: str = self._ask({"do": "vendor"}, timeout_s)["vendor"]
        return vendor

    def ask(self, pid: int, timeout_s: float) -> dict[str, bool]:
        """Ask whether a courier is ``running`` and whether its ``mpi`` is up."""
        return self._ask({"do": "ask", "pid": pid}, timeout_s)

    def kill(self, pid: int, timeout_s: float) -> None:
        """Have a courier killed by SIGKILL; then `wait` for its end."""
        self._ask({"do": "kill", "pid": pid}, timeout_s)

    def wait(self, pid: int, timeout_s: float) -> CourierEnd:
        """Wait for the end of a courier."""
        self._until(lambda: pid in self.ended, f"courier {pid} to end", timeout_s)
        return self.ended[pid]

    def wait_up(self, pid: int, timeout_s: float) -> bool:
        """Wait until a courier has initialized MPI or ended; return whether it has initialized MPI."""
        self._until(lambda: pid in self._up or pid in self.ended, f"courier {pid} to initialize MPI", timeout_s)
        return pid in self._up

    def step(self, timeout_s: float = 0.0) -> None:
        """Process what the zygote has sent. Raises ZygoteLost if it has ended."""
        self._check_owner()
        if self._sock.fileno() < 0:
            raise self._lost()
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        poll.poll(max(0.0, timeout_s) * 1000)
        if (received := receive_ready(self._sock)) is None:
            return
        if not received:
            raise self._lost()
        self._frames.add(received)
        try:
            for message in self._frames.messages():
                self._take(message)
        except BadFrame as error:
            raise ZygoteLost(f"the zygote sent {error}") from error

    def stop(self, timeout_s: float, kill: bool = True, tell: bool = False) -> None:
        """Kill the remaining couriers, or let them end, and end the zygote, whatever its state.

        After ``timeout_s`` it and its couriers are killed. ``tell``: whether to tell all ranks that this one has left
        the job.
        """
        if os.getpid() != self._owner:
            return
        end = time.monotonic() + timeout_s
        try:
            for pid in sorted(self._running) if kill else ():
                self.kill(pid, end - time.monotonic())
            for pid in sorted(self._running) if kill else ():
                self.wait(pid, end - time.monotonic())
            if self.process.poll() is None:
                self._ask({"do": "end", "tells": tell}, end - time.monotonic())
            self.process.wait(max(0.0, end - time.monotonic()))
        except (DeadlineExceeded, ZygoteLost, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        # A zygote that was killed did not do this.
        self.left = mpich_segments.remove_unmapped(set().union(*self._segments.values()))
        self._sock.close()

    # Messages

    def _ask(self, message: dict[str, Any], timeout_s: float, descriptors: Sequence[int] = ()) -> dict[str, Any]:
        self._check_owner()
        end = time.monotonic() + timeout_s
        self._send(pack(message), descriptors, end, timeout_s)
        self._unanswered += 1
        self._until(lambda: len(self._answers) == self._unanswered, "its zygote to answer", timeout_s, end)
        answer = self._answers[-1]  # earlier answers came too late for their callers
        self._answers.clear()
        self._unanswered = 0
        if "error" in answer:
            raise ZygoteRefused(f"the zygote refused to {message['do']}: {answer['error']}")
        return answer

    def _send(self, frame: bytes, descriptors: Sequence[int], end: float, timeout_s: float) -> None:
        view = memoryview(frame)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        while view:
            try:
                view = view[self._sock.sendmsg([view], rights) :]
                rights = []
            except BlockingIOError:
                poll = select.poll()
                poll.register(self._sock, select.POLLOUT)
                left = end - time.monotonic()
                if left <= 0 or not poll.poll(left * 1000):
                    if len(view) < len(frame):  # half a message was sent: no other can follow it
                        self._sock.close()
                    raise DeadlineExceeded(f"waited {timeout_s:g} s for its zygote to take a message") from None
            except OSError as error:
                raise self._lost() from error

    def _until(self, is_there: Callable[[], bool], what: str, timeout_s: float, end: float | None = None) -> None:
        end = time.monotonic() + timeout_s if end is None else end
        self._check_owner()
        while not is_there():
            left = end - time.monotonic()
            if left <= 0:
                raise DeadlineExceeded(f"waited {max(0.0, timeout_s):g} s for {what}")
            self.step(left)

    def _take(self, message: dict[str, Any]) -> None:
        match message:
            case {"event": "up", "pid": int(pid)}:
                self._up.add(pid)
            case {"event": "ended", "pid": int(pid), **fields}:
                self.ended[pid] = CourierEnd(
                    pid, fields["epoch"], fields["rank"], fields["status"], fields["signal"], fields["why"]
                )
                self._running.discard(pid)
                self._segments.pop(pid, None)
            case {"pid": int(pid)}:  # of a fork; an earlier courier may have had this number
                self.ended.pop(pid, None)
                self._up.discard(pid)
                self._running.add(pid)
                self._answers.append(message)
            case dict():
                self._answers.append(message)
            case _:
                raise BadFrame(f"no message of a zygote: {str(message)[:80]}")

    def _lost(self) -> ZygoteLost:
        try:
            status: object = self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            status = "nothing yet"
        return ZygoteLost(f"the zygote of this trainer has ended, with {status}; its output says why")

    def _check_owner(self) -> None:
        if os.getpid() != self._owner:
            raise RuntimeError("a process that was forked from the trainer has no zygote")


def _paths(environment: dict[str, str]) -> dict[str, str]:
    """Let Python find mlflash where this process finds it, and nothing in the working directory."""
    root = str(Path(__file__).resolve().parents[2])
    first = str(Path(sys.path[0] or ".").resolve()) if sys.path else ""
    if root in (first, os.getcwd()):  # a checkout, which is not installed
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (environment.get("PYTHONPATH"), root)))
    return {**environment, "PYTHONSAFEPATH": "1"}
