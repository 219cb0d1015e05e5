"""The ranks of one host: ``python -m mlflash.launcher.host_agent``, started on it by a remote shell.

The agent reads orders from standard input, one JSON object per line. The first one is a `Spec`; the agent answers with
a line of `READY` and a free port of this host. Then come ``{"start": {name: value}}``, with further environment
variables that are the same on all hosts; ``{"signal": number}``, a signal for all ranks; ``{"end": true}``, SIGTERM to
all ranks and SIGKILL a little later; and ``{}``, a sign of life.

The ranks are children of the agent, and each leads a session. They are all killed when standard input ends (the remote
shell or `mlflash run` has died), when nothing arrives any more (a cable is cut), or when the agent itself is killed
(`_Sweeper`). If one rank fails, the agent ends the others. It passes on the output of the ranks in whole lines. Its
exit code is the first exit code of a rank that is not 0.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from ..memory.courier_process import read_stat
from ..wireup.frames import BadFrame, Frames, Outbox, receive_ready
from ..wireup.launcher_variables import KEPT, SEED, without_rank
from ..wireup.own_process import end_with
from ..wireup.rendezvous import ports_of

LARGEST_NBYTES = 1 << 16
"""Largest size of a message, in both directions."""
BEATS = 8
"""Signs of life, in both directions, during the time after which a silent side counts as lost."""
_CONNECT_S = 10.0
_LEASE = 0.8  # after this share of that time the agent kills its processes, before others take their ranks
_LONGEST_NBYTES = 1 << 20
READY = "mlflash-ready:"  # start of the line that says that the agent accepts orders; a port follows
LOST = 255  # exit code if nobody gives orders any more. ssh uses the same
SILENCE_S = 60.0  # seconds without an order or a sign of life after which `mlflash run` counts as gone
_MEETS = ("MASTER_ADDR", "MASTER_PORT")
_END_S = 5.0  # time from SIGTERM to SIGKILL
_FLUSH_S = 5.0  # limit to write the remaining output
_NOT_FOUND = 127  # as a shell exits if a program is missing
_PORTS, _TRIES = range(10_000, 32_000), 100  # below the ports that a kernel gives to connections
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


class KeptProcesses:
    """The connection to the service that decides which processes have ranks (`kept_ranks`). Close it."""

    def __init__(self, told: dict[str, Any]):  # address and token of the service, name of this host, and lost_s
        self._told = told
        self._sock = socket.create_connection(told["address"], _CONNECT_S)
        self._sock.setblocking(False)
        self._frames, self._out = Frames(LARGEST_NBYTES), Outbox(self._sock)
        self._out.send({"token": told["token"], "host": told["host"]})
        self._beat_s = told["lost_s"] / BEATS
        self._heard = time.monotonic()
        self.until = self._heard  # when the next sign of life is due, by time.monotonic
        self._stopped: dict[int, float] = {}  # pid → since when
        self._has_ended = False

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def events(self) -> int:
        return select.POLLIN | (select.POLLOUT if self._out.unsent else 0)

    @property
    def is_lost(self) -> bool:
        """Whether nothing was heard for so long that other processes may have the ranks of this host."""
        return self._has_ended or time.monotonic() - self._heard > _LEASE * self._told["lost_s"]

    def environment(self, name: str, size: int) -> dict[str, str]:
        """The environment variable that tells a process how to reach the service."""
        what = {"address": self._told["address"], "token": self._told["token"], "name": name, "size": size}
        return {KEPT: json.dumps(what)}

    def ended(self, name: str, code: int) -> None:
        self._out.send({"ended": name, "code": code})

    def orders(self, is_ready: bool) -> Iterator[dict[str, Any]]:
        """Yield the orders that have arrived, and send a sign of life when it is time."""
        if time.monotonic() >= self.until:
            self.until = time.monotonic() + self._beat_s
            self._out.send({})
        if not is_ready:
            return
        self._out.send_rest()
        if (received := receive_ready(self._sock)) is None:
            return
        self._frames.add(received)
        self._has_ended = not received
        self._heard = time.monotonic()
        try:
            yield from self._frames.messages()
        except BadFrame:
            self._has_ended = True

    def stopped(self, pids: Iterable[int]) -> list[int]:
        """The processes that have been stopped (SIGSTOP) for so long that they count as lost."""
        now, since = time.monotonic(), self._stopped
        self._stopped = {pid: since.get(pid, now) for pid in pids if _is_stopped(pid)}
        return [pid for pid, start in self._stopped.items() if now - start > self._told["lost_s"]]

    def close(self) -> None:
        self._sock.close()


def _is_stopped(pid: int) -> bool:
    """Whether a process is stopped, or the child that it has forked to train in its place (`in_place.forked_spare`)."""
    try:
        stat = read_stat(pid)
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split() if stat.name == SEED else []
    except OSError:
        return False
    return stat.state == "T" or any(_is_stopped(int(child)) for child in children)  # "t" would be a debugger


class Lines:
    """Collects the output of a program until it can be passed on.

    A carriage return also ends a line, for progress bars. Lines longer than 1 MiB are passed on in pieces.
    """

    def __init__(self) -> None:
        self._begun = bytearray()

    def add(self, printed: bytes) -> bytes:
        end = max(printed.rfind(b"\n"), printed.rfind(b"\r")) + 1
        if not end and len(self._begun) + len(printed) <= _LONGEST_NBYTES:
            self._begun += printed
            return b""
        end = end or len(printed)
        whole = bytes(self._begun) + printed[:end]
        self._begun[:] = printed[end:]
        return whole

    def rest(self) -> bytes:
        """The last line, if it has no end yet, with a newline added; b"" if there is none."""
        left = bytes(self._begun)
        self._begun.clear()
        return left + b"\n" if left else b""


class Sink:
    """A descriptor to which several threads write whole lines. If nobody reads any more, lines are dropped."""

    def __init__(self, fd: int):
        self._fd, self._one = fd, threading.Lock()

    def write(self, lines: bytes) -> None:
        with self._one, contextlib.suppress(OSError):
            left = memoryview(lines)
            while left:
                left = left[os.write(self._fd, left) :]


@dataclasses.dataclass(frozen=True)
class Spec:
    """What to start on a host."""

    argv: list[str]
    environment: dict[str, str]  # variables for it, in addition to those of the host
    directory: str
    first: int  # first, count, size: the first rank of this host, the number of its ranks, and the number of all ranks
    count: int
    size: int
    used: list[int]  # ports that the agent must not propose
    # how to reach the service that decides if processes stay when others are lost; None: if one rank fails, all end
    keeps: dict[str, Any] | None = None
    host: str = ""
    spares: int = 0
    local_size: int = 0


class _Sweeper:
    """A second process that kills the ranks if the agent is killed and cannot do so itself.

    It has a session of its own, because whoever kills the agent may kill its whole process group.
    """

    def __init__(self) -> None:
        heard, self._told = os.pipe()
        if os.fork():
            os.close(heard)
            return
        try:
            os.close(self._told)
            self._sweep(heard)
        finally:
            os._exit(0)

    @staticmethod
    def _sweep(heard: int) -> None:
        os.setsid()
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        nothing = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(nothing, fd)
        said = b""
        while more := os.read(heard, 4096):
            said += more
        words = said.split()
        groups: set[int] = set()
        for told in [int(word) for word in words if word != b"done"]:
            (groups.add if told > 0 else groups.discard)(abs(told))
        for group in groups if b"done" not in words else ():
            _kill_group(group, signal.SIGKILL)

    def forget(self, group: int) -> None:
        os.write(self._told, b"-%d\n" % group)

    def note(self, group: int) -> None:
        """Tell it that a group must be killed. Call this before the group can start anything."""
        os.write(self._told, b"%d\n" % group)

    def dismiss(self) -> None:
        os.write(self._told, b"done\n")
        os.close(self._told)


class _Rank:
    """A rank that was started. It is not reaped before the end, so that no other group gets its number."""

    def __init__(self, process: subprocess.Popen[bytes], name: str):
        self.pid, self.process, self.name = process.pid, process, name
        self.pidfd = os.pidfd_open(process.pid)

    def code(self) -> int:
        found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        assert found is not None
        return found.si_status if found.si_code == os.CLD_EXITED else 128 + found.si_status


class HostAgent:
    """The process: `run` is its loop."""

    def __init__(self, sweeper: _Sweeper):
        self._sweeper = sweeper
        self._spec: Spec | None = None
        self._heard, self._begun = time.monotonic(), bytearray()
        self._started: list[_Rank] = []
        self._living: dict[int, _Rank] = {}  # ranks by their pidfd
        self._is_over = False
        self._code = 0
        self._is_ending = False
        self._kill_at: float | None = None
        self._kept: KeptProcesses | None = None
        self._sinks = Sink(1), Sink(2)
        self._copies: list[threading.Thread] = []
        self._stop, self._stopped = os.pipe()
        self._signals, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake)
        for number in _SIGNALS:
            signal.signal(number, lambda number, frame: None)

    def run(self) -> int:
        while not self._is_over:
            ready = self._wait()
            if 0 in ready:
                self._listen()
            if self._signals in ready:
                for number in os.read(self._signals, 64):
                    self._lose("the agent received SIGHUP") if number == signal.SIGHUP else self._signal(number)
            for rank in [rank for pidfd, rank in self._living.items() if pidfd in ready]:
                self._note_end(rank)
            now = time.monotonic()
            if self._kept is not None:
                self._keep(self._kept, ready)
            if now - self._heard > SILENCE_S:
                self._lose(f"nothing was heard from `mlflash run` for {SILENCE_S:g} s")
            elif self._kill_at is not None and now >= self._kill_at:
                self._kill_at = None
                self._signal(signal.SIGKILL)
        self._close()
        return self._code

    def _wait(self) -> list[int]:
        moments = [self._heard + SILENCE_S]
        moments += [] if self._kill_at is None else [self._kill_at]
        poll = select.poll()
        for fd in (0, self._signals, *self._living):
            poll.register(fd, select.POLLIN)
        if self._kept is not None:
            poll.register(self._kept.fileno(), self._kept.events)
            moments.append(self._kept.until)
        return [fd for fd, _ in poll.poll(max(0.0, min(moments) - time.monotonic()) * 1000 + 1)]

    # Orders

    def _listen(self) -> None:
        said = os.read(0, 1 << 16)
        self._heard = time.monotonic()
        if not said:
            self._lose("")
            return
        *lines, rest = (bytes(self._begun) + said).split(b"\n")
        self._begun[:] = rest
        for line in lines:
            self._obey(json.loads(line))

    def _obey(self, order: dict[str, Any]) -> None:
        if self._spec is None:
            self._spec = Spec(**order)
            try:
                os.chdir(self._spec.directory)
            except OSError as error:
                self._fail(f"cannot change to the working directory {self._spec.directory}: {error.strerror}", 1)
                return
            self._sinks[0].write(f"{READY}{_free_port(self._spec.used)}\n".encode())
        elif "start" in order:
            self._start(self._spec, order["start"])
        elif "signal" in order:
            self._signal(order["signal"])
        elif "end" in order:
            self._end()

    def _signal(self, number: int) -> None:
        if not self._started:  # there is no rank that could handle the signal
            self._is_over, self._code = True, self._code or 128 + number
        for rank in self._living.values():
            _kill_group(rank.pid, number)

    def _end(self) -> None:
        self._signal(signal.SIGTERM)
        if not self._is_ending:
            self._is_ending, self._kill_at = True, time.monotonic() + _END_S
        self._is_over = self._is_over or not self._living

    def _lose(self, why: str) -> None:
        """Kill all ranks, because whoever started them is gone."""
        if why:
            self._say(f"{why}, so the ranks here are killed")
        self._is_over, self._code = True, self._code or LOST

    def _fail(self, why: str, code: int) -> None:
        self._say(why)
        self._is_over, self._code = True, code

    def _say(self, text: str) -> None:
        self._sinks[1].write(f"mlflash run: on {socket.gethostname()}: {text}\n".encode())

    # Ranks

    def _start(self, spec: Spec, more: dict[str, str]) -> None:
        if spec.keeps is not None:
            self._kept = KeptProcesses(spec.keeps)
        there = {**without_rank(os.environ), **spec.environment, **more}
        self._whole = {**there, "LOCAL_WORLD_SIZE": str(spec.local_size)}
        for local in range(spec.count):
            mine = {"RANK": str(spec.first + local), "WORLD_SIZE": str(spec.size)}
            self._start_one(spec, f"{spec.host}#{local}", local, mine)
        for local in range(spec.count, spec.count + spec.spares):
            self._start_one(spec, f"{spec.host}#{local}", local, {})

    def _start_one(self, spec: Spec, name: str, local: int, mine: dict[str, str]) -> None:
        environment = {**self._whole, "LOCAL_RANK": str(local), **mine}
        if self._kept is not None:
            environment |= self._kept.environment(name, spec.size)
        if not mine:  # it has no rank yet, and must not join those that have
            environment = {key: value for key, value in environment.items() if key not in _MEETS}
        me = os.getpid()

        def begin() -> None:
            self._sweeper.note(os.getpid())  # the rank itself does it: the agent may be killed before it knows the rank
            end_with(me)

        try:
            process = subprocess.Popen(
                spec.argv, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, start_new_session=True, preexec_fn=begin,
            )  # fmt: skip
        except OSError as error:
            self._fail(f"{spec.argv[0]} cannot be started: {error.strerror}", _NOT_FOUND)
            return
        rank = _Rank(process, name)
        self._started.append(rank)
        self._living[rank.pidfd] = rank
        for pipe, sink in zip((process.stdout, process.stderr), self._sinks, strict=True):
            assert pipe is not None
            thread = threading.Thread(target=_copy, args=(pipe, self._stop, sink), daemon=True)
            thread.start()
            self._copies.append(thread)

    def _keep(self, kept: KeptProcesses, ready: list[int]) -> None:
        assert self._spec is not None
        for order in kept.orders(kept.fileno() in ready):
            if "one" in order:
                self._start_one(self._spec, order["one"], order["local"], {})
            for rank in [rank for rank in self._living.values() if rank.name == order.get("kill")]:
                _kill_group(rank.pid, signal.SIGKILL)
        for pid in kept.stopped(rank.pid for rank in self._living.values()):
            self._say(f"process {pid} is stopped (SIGSTOP), and nobody lets it go on: the agent kills it")
            _kill_group(pid, signal.SIGKILL)
        if kept.is_lost:
            self._lose("nothing was heard from the service that assigns the ranks of this job")

    def _note_end(self, rank: _Rank) -> None:
        del self._living[rank.pidfd]
        code = rank.code()
        if self._kept is not None:
            _kill_group(rank.pid, signal.SIGKILL)  # all that it started, except couriers, which end by themselves
            self._sweeper.forget(rank.pid)
            rank.process.wait()
            os.close(rank.pidfd)
            self._started.remove(rank)
            self._copies = [thread for thread in self._copies if thread.is_alive()]
            self._kept.ended(rank.name, code)
        elif code and not self._code:
            self._code = code
            self._end()
        self._is_over = self._is_over or (not self._living and (self._kept is None or self._is_ending))

    def _close(self) -> None:
        if self._kept is not None:
            self._kept.close()
        for rank in self._started:
            _kill_group(rank.pid, signal.SIGKILL)
        for rank in self._living.values():
            select.select([rank.pidfd], [], [], _FLUSH_S)
        os.close(self._stopped)
        end = time.monotonic() + _FLUSH_S
        for thread in self._copies:
            thread.join(max(0.0, end - time.monotonic()))
        self._sweeper.dismiss()


def _copy(pipe: IO[bytes], stop: int, sink: Sink) -> None:
    """Pass on the output of a rank until it ends. Its couriers may keep the pipe open after the rank has ended."""
    source, lines, poll = pipe.fileno(), Lines(), select.poll()
    for fd in (source, stop):
        poll.register(fd, select.POLLIN)
    while source in (ready := dict(poll.poll())) or stop not in ready:
        if not (printed := os.read(source, 1 << 16)):
            break
        sink.write(lines.add(printed))
    sink.write(lines.rest())
    pipe.close()


def _kill_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _free_port(used: Collection[int]) -> int:
    """A port on which nobody listens here now, and neither on the ports that mlflash derives from it."""
    port = 0
    for _ in range(_TRIES):
        port = random.choice(_PORTS)
        if port not in used and all(map(_is_free, (port, *ports_of(port)))):
            break
    return port


def _is_free(port: int) -> bool:
    try:
        with socket.socket() as sock:
            sock.bind(("", port))
    except OSError:
        return False
    return True


if __name__ == "__main__":
    code = HostAgent(_Sweeper()).run()
    os._exit(code)  # a thread may still write to a reader that does not read
