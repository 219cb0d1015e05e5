"""Zygotes that survive when their trainers are killed: another process of the job starts them (``mlflash courier``).

A scheduler usually kills a whole step of a job: a process with everything that it has started. A zygote that the
trainer has started dies with it, and so does a commit that is under way. So a trainer first looks for a host of its job
on its node. The host starts the zygote, which is connected to the trainer as usual. Trainer and host find each other by
a socket in this user's directory in memory. Its name contains the job: that of Slurm, and ``MLFLASH_JOB``.

Messages are `frames`: the trainer sends ``arguments``, ``environment`` and ``cwd``, with its end of the zygote's
socket and its own pidfd; the answer is the zygote's ``pid``, with its pidfd.
"""

from __future__ import annotations

import array
import contextlib
import hashlib
import os
import select
import selectors
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import DeadlineExceeded, JobInUse
from .frames import BadFrame, Frames, pack
from .own_process import opened

READY = "couriers of this job start here now"
"""What `mlflash courier` prints when it is ready for trainers."""
_MEMORY = "/dev/shm"  # the default of MLFLASH_MEMORY
_LARGEST_NBYTES = 1 << 22  # of a request, which contains an environment
_ANSWER_S = 10.0
_REQUEST_S = 2.0  # limit for a request to arrive: whoever says nothing delays the others
_BACKLOG = 1024
SOCK, TRAINER = "{sock}", "{trainer}"
"""Placeholders in the arguments of a program: the number of the zygote's socket; the trainer and its pidfd."""
_CREDENTIALS = struct.Struct("3i")  # of SO_PEERCRED: pid, uid, gid


def place(environment: Mapping[str, str]) -> Path:
    """The directory where trainers with this environment look for a host."""
    return Path(environment.get("MLFLASH_MEMORY") or _MEMORY, f"mlflash-{os.geteuid()}")


def names(environment: Mapping[str, str]) -> list[str]:
    """The names of the sockets of a host of this job; [] if it is unknown which job that is."""
    known = ((word, environment.get(word, "")) for word in ("SLURM_JOB_ID", "MLFLASH_JOB"))
    return [f"couriers-{hashlib.sha256(f'{word} {value}'.encode()).hexdigest()[:16]}" for word, value in known if value]


class HostedProcess:
    """A zygote that a host has started, with the methods of `subprocess.Popen` that a trainer uses."""

    def __init__(self, pid: int, pidfd: int):
        self.pid, self._pidfd = pid, pidfd

    def poll(self) -> int | None:
        """None while it runs, 0 afterwards: only the host knows its status."""
        return 0 if self._has_ended(0) else None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        if not self._has_ended(timeout):
            raise subprocess.TimeoutExpired("a zygote", timeout or 0.0)
        return 0

    def kill(self) -> None:
        """Kill it, if it runs."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _has_ended(self, timeout_s: float | None) -> bool:
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000))

    def __del__(self) -> None:
        os.close(self._pidfd)


def start(environment: Mapping[str, str], arguments: Sequence[str], its: Mapping[str, str], descriptor: int
          ) -> HostedProcess | None:  # fmt: skip
    """Have a host of this job start a zygote with this environment and the end of a socket; None if there is no host.

    The arguments of the program include `SOCK` and `TRAINER`. Raises DeadlineExceeded: the host does not answer.
    """
    directory = place(environment)
    if not directory.is_dir():
        return None
    with opened(directory) as folder:
        for name in names(environment):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                sock.settimeout(_ANSWER_S)
                if sock.connect_ex(f"{folder}/{name}") == 0:
                    return _ask(sock, its, arguments, descriptor)
    return None


def _ask(sock: socket.socket, its: Mapping[str, str], arguments: Sequence[str], descriptor: int
         ) -> HostedProcess | None:  # fmt: skip
    me = os.pidfd_open(os.getpid())
    request = pack({"arguments": [*arguments], "environment": {**its}, "cwd": os.getcwd(), "pid": os.getpid()})
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor, me]))]
    try:
        sent = sock.sendmsg([request], rights)
        if sent < len(request):  # to send nothing fails, too, where the answer is there and the host has closed
            sock.sendall(request[sent:])
        frames, descriptors = Frames(_LARGEST_NBYTES), list[int]()
        while True:
            data, got, _, _ = socket.recv_fds(sock, 1 << 16, 1)
            descriptors += got
            frames.add(data)
            for answer in frames.messages():
                return HostedProcess(answer["pid"], descriptors.pop())
            if not data:
                return None  # it ends: this process starts one itself
    except (BrokenPipeError, ConnectionResetError):  # the host is ending
        return None
    except TimeoutError:
        raise DeadlineExceeded(f"waited {_ANSWER_S:g} s for `mlflash courier` to start couriers") from None
    finally:
        os.close(me)


class ZygoteHost:
    """The host of one job on one node. A context manager.

    Raises:
        JobInUse: this node already has a host of this job.
        UnsafePath: the directory is somebody else's, or open to others.
        ValueError: the environment does not say which job it is.
    """

    def __init__(self, environment: Mapping[str, str]):
        self._names = names(environment)
        if not self._names:
            raise ValueError("this process does not know its job: set MLFLASH_JOB, or start it in a Slurm job")
        self._closed = contextlib.ExitStack()
        self._folder = self._closed.enter_context(opened(place(environment)))
        self._selector = self._closed.enter_context(selectors.DefaultSelector())
        self._zygotes: list[subprocess.Popen[bytes]] = []
        self._is_ending = False

    def __enter__(self) -> ZygoteHost:
        with contextlib.ExitStack() as failed:
            failed.callback(self._closed.close)
            for name in self._names:
                self._listen(name)
            failed.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.close()

    def _listen(self, name: str) -> None:
        path = f"{self._folder}/{name}"
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
                other.connect(path)
            raise JobInUse("a `mlflash courier` of this job already runs on this node", found=name)
        sock = self._closed.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # of a host that was killed
        sock.bind(path)
        self._closed.callback(os.unlink, path)
        sock.listen(_BACKLOG)
        sock.setblocking(False)
        self._selector.register(sock, selectors.EVENT_READ, self._accept)

    def run(self) -> None:
        """Start zygotes until SIGTERM or SIGINT, then wait for the end of the running ones.

        Must be called on the main thread.
        """
        woken, wakes = socket.socketpair()
        with woken, wakes:
            for end in (woken, wakes):
                end.setblocking(False)
            self._selector.register(woken, selectors.EVENT_READ, lambda _: woken.recv(1 << 10))
            before = {number: signal.signal(number, self._end) for number in (signal.SIGTERM, signal.SIGINT)}
            before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
            fd = signal.set_wakeup_fd(wakes.fileno())
            try:
                while not self._is_ending or self._zygotes:
                    for key, _ in self._selector.select():
                        key.data(key.fileobj)
                    self._zygotes = [zygote for zygote in self._zygotes if zygote.poll() is None]
            finally:
                signal.set_wakeup_fd(fd)
                for number, handler in before.items():
                    signal.signal(number, handler)

    def _end(self, *_: object) -> None:
        self._is_ending = True

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:  # the client has gone, or there are no descriptors left
            return
        with sock, contextlib.suppress(OSError, BadFrame, KeyError, TypeError, ValueError):
            sock.settimeout(_REQUEST_S)
            credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            if not self._is_ending and _CREDENTIALS.unpack(credentials)[1] == os.geteuid():
                self._serve(sock)

    def _serve(self, sock: socket.socket) -> None:
        with _received(sock) as (request, (its, trainer)):
            fill = {SOCK: str(its), TRAINER: f"{int(request['pid'])}:{trainer}"}
            zygote = subprocess.Popen(
                [fill.get(word, word) for word in request["arguments"]],
                env=request["environment"],
                cwd=request["cwd"],
                pass_fds=[its, trainer],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._zygotes.append(zygote)
        pidfd = os.pidfd_open(zygote.pid)
        try:
            socket.send_fds(sock, [pack({"pid": zygote.pid})], [pidfd])
        finally:
            os.close(pidfd)


@contextlib.contextmanager
def _received(sock: socket.socket) -> Iterator[tuple[dict[str, Any], tuple[int, int]]]:
    """One request with its two descriptors, which are closed afterwards."""
    frames, descriptors = Frames(_LARGEST_NBYTES), list[int]()
    end = time.monotonic() + _REQUEST_S
    try:
        while time.monotonic() < end:
            data, got, _, _ = socket.recv_fds(sock, 1 << 16, 2)
            descriptors += got
            frames.add(data)
            for request in frames.messages():
                its, trainer = descriptors
                yield request, (its, trainer)
                return
            if not data:
                raise BadFrame("the connection ended before a whole message")
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
