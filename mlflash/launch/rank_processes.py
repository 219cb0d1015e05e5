"""The ranks of a node: its agent starts and ends them as `mlflash run` orders, and passes on what they print and say.

All of it goes over one connection, as lines of JSON. `mlflash run` asks with an ``id``, and gets ``{"id", "is"}`` or
``{"id", "error"}``: ``start`` (a process, with its ``name``), ``port`` (a free one of this node), and all that the
process of `status` does. It orders ``signal`` (processes by ``names``), ``tell`` (a process a ``message``),
``printed`` (what came from a ``pipe``; only then more is read of it), ``guard`` (what to run if `mlflash run` is lost)
and ``bye``.

The agent sends ``{"ended": name, "code", "cause"}`` (see `cause`), ``{"prints": text, "to": 1 or 2, "pipe"}``, and
``{"from": name, "says": message}`` for a process that is kept: it reaches its agent by a socket of this node. ``{}`` is
a sign of life, in both directions.

Each process leads a session. All are killed when the connection ends, when nothing is heard for too long (a cable is
cut), or when the agent itself is killed (`_Sweeper`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import IO, Any

from ..memory.process_names import read_stat
from .agent_process import peer_uid
from .cause import Cause, cause_of
from .handshake import Strangers, introduce
from .kernel_evidence import KernelEvidence
from .launcher_variables import KEPT, SEED, without_rank
from .lines import Connection
from .own_process import end_with, running
from .rendezvous import free_port

LARGEST_NBYTES = 1 << 24
"""Largest size of a message, in both directions."""
BEATS = 8
"""Signs of life, in both directions, during the time after which a silent side counts as lost."""
LOST = 255
"""Exit code if nobody gives orders any more. ssh uses the same."""
NOT_FOUND = 127
"""Exit code of a program that cannot be started, as of a shell."""
_LEASE = 0.8  # after this share of that time the agent kills its processes, before others take their ranks
_CONNECT_S = 30.0
_STATUS_S = 30.0  # a process of `status` that has not answered for so long is replaced
_END_S = 5.0  # limit for killed processes to end
_LINE_NBYTES = 1 << 20  # longer lines are passed on in pieces
_LAST_NBYTES = 1 << 16  # of stderr, which may say why a rank failed
_RANK_NBYTES = 1 << 16  # largest size of a message of a rank
_STRANGERS = 1 << 9  # connections that have not said which rank they are: all ranks of a node may connect at once
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
_PASSED_ON = _SIGNALS[:-1]


class _Rank:
    """A process that was started."""

    def __init__(self, process: subprocess.Popen[bytes], is_kept: bool, kernel_mark: int):
        self.process, self.is_kept, self.kernel_mark = process, is_kept, kernel_mark
        self.pidfd = os.pidfd_open(process.pid)
        self.connection: Connection | None = None
        self.untold: list[Any] = []  # until it has connected
        self.stopped_since: float | None = None
        self.senders: dict[int, str] = {}  # who has sent it which signal
        self.errors = _WholeLines(2)


class _WholeLines:
    """Collects output until it can be passed on. A carriage return also ends a line, for progress bars."""

    def __init__(self, number: int):
        self.number, self._partial = number, bytearray()
        self.last = b""  # of stderr

    def add(self, printed: bytes) -> bytes:
        if self.number == 2:
            self.last = (self.last + printed)[-_LAST_NBYTES:]
        end = max(printed.rfind(b"\n"), printed.rfind(b"\r")) + 1
        if not end and len(self._partial) + len(printed) <= _LINE_NBYTES:
            self._partial += printed
            return b""
        end = end or len(printed)
        whole = bytes(self._partial) + printed[:end]
        self._partial[:] = printed[end:]
        return whole

    def rest(self) -> bytes:
        """The last line, if it has no end yet, with a newline added; b"" if there is none."""
        left = bytes(self._partial)
        self._partial.clear()
        return left + b"\n" if left else b""


class _Sweeper:
    """A second process that kills the ranks, with all in their groups, if the agent is killed and cannot do so.

    It has a session of its own, because whoever kills the agent may kill its whole process group.
    """

    def __init__(self) -> None:
        agent, (heard, self._pipe) = os.pidfd_open(os.getpid()), os.pipe()
        if os.fork():
            os.close(heard)
            os.close(agent)
            return
        try:
            self._sweep(agent, heard)
        finally:
            os._exit(0)

    @staticmethod
    def _sweep(agent: int, heard: int) -> None:
        os.setsid()
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        nothing = os.open(os.devnull, os.O_RDWR)
        for fd in range(3):
            os.dup2(nothing, fd)
        os.set_blocking(heard, False)
        groups, text = set[int](), b""
        while True:
            ended = agent in select.select([agent, heard], [], [])[0]  # children of the agent may keep the pipe open
            with contextlib.suppress(BlockingIOError):
                while more := os.read(heard, 1 << 16):
                    text += more
            *words, text = text.split(b"\n")
            for group in map(int, words):
                (groups.add if group > 0 else groups.discard)(abs(group))
            if ended:
                break
        for group in groups:
            _kill_group(group, signal.SIGKILL)

    def note(self, group: int) -> None:
        """Tell it that a group must be killed. Call this before the group can start anything."""
        os.write(self._pipe, b"%d\n" % group)

    def forget(self, group: int) -> None:
        os.write(self._pipe, b"-%d\n" % group)


class RankProcesses:
    """The ranks of this node. Make it where no threads run: it forks. Others may use the loop of `serve`, too."""

    def __init__(self) -> None:
        self._sweeper = _Sweeper()
        self._kernel = KernelEvidence()
        self._ranks: dict[str, _Rank] = {}
        self._pipes: dict[int, tuple[IO[bytes], _WholeLines]] = {}
        self._guard: dict[str, Any] | None = None
        self._run: Connection
        self._status: Connection | None = None
        self._status_process: subprocess.Popen[bytes] | None = None
        self._asked: dict[int, tuple[float, dict[str, Any]]] = {}  # questions to it, and when they came
        self._strangers = Strangers(_STRANGERS, _CONNECT_S)
        self._moves: list[Callable[[str], None]] = []  # get the answers of `mlflash run`, by number

    async def serve(self, greeting: dict[str, Any]) -> int:
        """Do what `mlflash run` orders, until it says goodbye or is lost. No process that it has ordered is left then.

        Args:
            greeting: ``address`` and ``token`` of `mlflash run`, the name that this ``host`` has there, and ``lost_s``.

        Returns:
            0 after a goodbye, else `LOST`.

        Raises:
            OSError: `mlflash run` cannot be reached.
        """
        self._loop = asyncio.get_running_loop()
        self._over: asyncio.Future[int] = self._loop.create_future()
        self._lost_s, self._heard = float(greeting["lost_s"]), self._loop.time()
        connection = lambda: Connection(self._obey, lambda why: self._lose(""), LARGEST_NBYTES)  # noqa: E731
        _, self._run = await asyncio.wait_for(
            self._loop.create_connection(connection, *greeting["address"]), _CONNECT_S
        )
        # An address without a file, and new each time. Others of this user, who may do anything here, could find it.
        self._socket = f"mlflash-{os.geteuid()}-{secrets.token_hex(8)}"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"\0{self._socket}")
        server = await self._loop.create_unix_server(self._accept, sock=listener, backlog=_STRANGERS)
        for number in _PASSED_ON:
            self._loop.add_signal_handler(number, self._pass_on, number)
        self._loop.add_signal_handler(signal.SIGPWR, self._leave_node)
        self._loop.add_signal_handler(signal.SIGHUP, self._lose, "its agent received SIGHUP")
        tasks: list[asyncio.Task[None]] = []
        try:
            await asyncio.wait_for(introduce(self._run, greeting["token"], host=greeting["host"]), _CONNECT_S)
            tasks = [self._loop.create_task(work) for work in (self._watch(), self._keep_status())]
            code = await self._over
        except (OSError, asyncio.TimeoutError):  # `mlflash run` has ended meanwhile, or has another agent here
            code = LOST
        finally:
            server.close()
            self._strangers.close()
            for task in tasks:
                task.cancel()
            self._kill_all()
            self._run.end()
        if code and self._guard is not None:
            await self._stand_guard(self._guard)
        return code

    def _lose(self, why: str) -> None:
        """End, with all ranks: whoever started them is gone."""
        if not self._over.done():
            if why:
                self._say(f"{why}, so the ranks here are killed")
            self._over.set_result(LOST)

    def _say(self, text: str) -> None:
        print(f"mlflash run: on {socket.gethostname()}: {text}", file=sys.stderr, flush=True)

    async def _watch(self) -> None:
        """Give signs of life, and look for those of `mlflash run` and of the ranks that are kept."""
        while True:
            self._run.send({})
            await asyncio.sleep(self._lost_s / BEATS)
            now = self._loop.time()
            if now - self._heard > _LEASE * self._lost_s:
                self._lose(f"nothing was heard from `mlflash run` for {_LEASE * self._lost_s:g} s")
            for rank in [rank for rank in self._ranks.values() if rank.is_kept]:
                pid, since = rank.process.pid, rank.stopped_since
                rank.stopped_since = (now if since is None else since) if is_stopped(pid) else None
                if since is not None and rank.stopped_since is not None and now - since > self._lost_s:
                    self._say(f"process {pid} is stopped (SIGSTOP), and nobody lets it go on: the agent kills it")
                    rank.senders[signal.SIGKILL] = "its agent, because it was stopped"
                    _kill_group(pid, signal.SIGKILL)

    # Orders

    def _obey(self, order: dict[str, Any]) -> None:
        self._heard = self._loop.time()
        match order:
            case {"do": "start", "id": int(number)}:
                self._run.send({"id": number, **self._start(order)})
            case {"do": "port", "id": int(number), "used": list(used)}:
                self._run.send({"id": number, "is": free_port(used)})
            case {"do": "signal", "number": int(number), "names": list(names)}:
                self._signal(number, names, "`mlflash run`")
            case {"do": "tell", "name": str(name), "message": dict(message)}:
                if (rank := self._ranks.get(name)) is not None:
                    rank.untold.append(message)
                    self._tell(rank)
            case {"do": "printed", "pipe": int(fd)}:
                if fd in self._pipes:
                    self._loop.add_reader(fd, self._read, fd)
            case {"do": "moves", "number": int(number), "why_not": str(why_not)}:
                self._moves[number](why_not)
            case {"do": "guard"}:
                self._guard = order
            case {"do": "bye"}:
                if not self._over.done():
                    self._over.set_result(0)
            case {"id": int(number)}:
                self._ask_status(number, order)

    def move(self, host: str, answer: Callable[[str], None]) -> None:
        """Ask `mlflash run` to have all ranks leave a node; "" is this one. It answers why not, "" if they will."""
        self._moves.append(answer)
        self._run.send({"move": host, "number": len(self._moves) - 1})

    def _leave_node(self) -> None:
        """Ask that all ranks leave this node, because it is about to be gone."""

        def answer(why_not: str) -> None:
            stay = f"its ranks stay, because {why_not}"
            self._say(f"received SIGPWR: {stay if why_not else 'its ranks move after the next save'}")

        self.move("", answer)

    def _pass_on(self, number: int) -> None:
        if not self._ranks:  # there is no rank that could handle the signal
            self._lose("")
        self._signal(number, self._ranks, "whoever sent it to its agent")

    def _signal(self, number: int, names: Collection[str], sender: str) -> None:
        for rank in [rank for name, rank in self._ranks.items() if name in names]:
            rank.senders[number] = sender
            _kill_group(rank.process.pid, number)

    # Processes

    def _start(self, order: dict[str, Any]) -> dict[str, Any]:
        name, me = order["name"], os.getpid()
        environment = {**without_rank(os.environ), **order["environment"]}
        if order["kept"]:
            waits = "RANK" not in environment
            environment[KEPT] = json.dumps(
                {"socket": self._socket, "name": name, "size": order["kept"], "waits": waits}
            )
            if waits:  # programs ask for them before there is a rank
                environment |= {"RANK": "0", "WORLD_SIZE": str(order["kept"])}
        cores = _cores(environment)

        def begin() -> None:
            self._sweeper.note(os.getpid())  # the rank itself does it: the agent may be killed before it knows the rank
            end_with(me)
            if cores:
                os.sched_setaffinity(0, cores)

        if not os.path.isdir(order["directory"]):
            return {"error": f"there is no directory {order['directory']} for its ranks to start in", "code": 1}
        try:
            process = subprocess.Popen(
                order["argv"], env=environment, cwd=order["directory"], stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, preexec_fn=begin,
            )  # fmt: skip
        except OSError as error:
            return {"error": f"{order['argv'][0]} cannot be started: {error.strerror}", "code": NOT_FOUND}
        rank = self._ranks[name] = _Rank(process, bool(order["kept"]), self._kernel.mark())
        self._loop.add_reader(rank.pidfd, self._note_end, name, rank)
        for number, pipe in enumerate((process.stdout, process.stderr), 1):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self._pipes[pipe.fileno()] = pipe, rank.errors if number == 2 else _WholeLines(number)
            self._loop.add_reader(pipe.fileno(), self._read, pipe.fileno())
        return {"is": process.pid}

    def _note_end(self, name: str, rank: _Rank) -> None:
        self._loop.remove_reader(rank.pidfd)
        self._loop.call_soon(self._report_end, name, rank)  # after what it has sent, which has arrived by now

    def _report_end(self, name: str, rank: _Rank) -> None:
        if self._ranks.pop(name, None) is None:
            return
        # Until it is reaped, no other group gets its number.
        _kill_group(rank.process.pid, signal.SIGKILL)  # all that it started, except couriers, which end by themselves
        self._sweeper.forget(rank.process.pid)
        code = rank.process.wait()
        os.close(rank.pidfd)
        for pipe in (rank.process.stdout, rank.process.stderr):
            if pipe is not None and not pipe.closed:
                self._read_rest(pipe.fileno())
        if rank.connection is not None:
            rank.connection.close()
        code = code if code >= 0 else 128 - code
        self._run.send({"ended": name, "code": code, "cause": self._cause(rank, code).fields})

    def _cause(self, rank: _Rank, code: int) -> Cause:
        oom_kills, kernel = self._kernel.oom_kills(), self._kernel.since(rank.kernel_mark)
        stderr, sender = rank.errors.last.decode(errors="replace"), rank.senders.get(code - 128, "")
        return cause_of(code, stderr, sender, oom_kills, kernel, rank.process.pid)

    def _kill_all(self) -> None:
        self._signal(signal.SIGKILL, self._ranks, "its agent")
        for name, rank in list(self._ranks.items()):
            self._loop.remove_reader(rank.pidfd)
            if select.select([rank.pidfd], [], [], _END_S)[0]:
                self._report_end(name, rank)
        for fd in list(self._pipes):
            self._read_rest(fd)
            if fd in self._pipes:  # otherwise it was read to its end
                self._close(fd)

    # What they print

    def _read(self, fd: int) -> bool:
        """Pass on what can be read of a pipe now. Return whether there may be more."""
        _, lines = self._pipes[fd]
        try:
            printed = os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        if text := lines.add(printed) if printed else lines.rest():
            self._run.send({"prints": text.decode(errors="surrogateescape"), "to": lines.number, "pipe": fd})
            self._loop.remove_reader(fd)  # until it is printed: if nobody reads it, the pipe fills, and the rank waits
        if not printed:
            self._close(fd)
        return bool(printed)

    def _read_rest(self, fd: int) -> None:
        """Read what an ended rank has printed. Couriers may have the pipe open, too."""
        for _ in range(32):
            if fd not in self._pipes or not self._read(fd):
                break

    def _close(self, fd: int) -> None:
        self._loop.remove_reader(fd)
        self._pipes.pop(fd)[0].close()

    # What they say

    def _accept(self) -> Connection:
        """A connection of a rank that is kept; it says first which one it is."""
        name = ""

        def hear(message: dict[str, Any]) -> None:
            nonlocal name
            if name:
                self._run.send({"from": name, "says": message})
                return
            name, rank = message["name"], self._ranks[message["name"]]
            self._strangers.forget(connection)
            rank.connection = connection
            self._tell(rank)

        connection = _OfThisUser(hear, lambda why: self._strangers.forget(connection), _RANK_NBYTES)
        self._strangers.add(connection)
        return connection

    def _tell(self, rank: _Rank) -> None:
        if rank.connection is not None:
            for message in rank.untold:
                rank.connection.send(message)
            rank.untold = []

    # Other processes

    def _ask_status(self, number: int, question: dict[str, Any]) -> None:
        now, count = self._loop.time(), len(self._asked)
        self._asked = {key: asked for key, asked in self._asked.items() if now - asked[0] < _STATUS_S}
        if self._status_process is not None and len(self._asked) < count:
            _kill_group(self._status_process.pid, signal.SIGKILL)
        self._asked[number] = now, question
        if self._status is not None:
            self._status.send(question)

    def _answer(self, answer: dict[str, Any]) -> None:
        self._asked.pop(answer["id"], None)
        self._run.send(answer)

    async def _keep_status(self) -> None:
        """Have a process of `status`, whatever becomes of the last one. A driver of a GPU may hold it up for ever."""
        while True:
            own_end, other_end = socket.socketpair()
            ended = asyncio.Event()
            with other_end:
                self._status_process = process = subprocess.Popen(
                    running("mlflash.tools.status_process"),
                    stdin=other_end.fileno(),
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                )
            connection = lambda: Connection(self._answer, lambda why: ended.set(), LARGEST_NBYTES)  # noqa: B023, E731
            _, self._status = await self._loop.create_unix_connection(connection, sock=own_end)
            for _, question in self._asked.values():
                self._status.send(question)
            try:
                await ended.wait()
            finally:
                self._status = self._status_process = None
                _kill_group(process.pid, signal.SIGKILL)  # nvidia-smi, too
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_END_S)
            await asyncio.sleep(1.0)

    async def _stand_guard(self, guard: dict[str, Any]) -> None:
        """Run what `mlflash run` has left for its own loss, to its end. Slurm kills it with this process."""
        for number in _SIGNALS:
            self._loop.add_signal_handler(number, lambda: None)
        process = subprocess.Popen(guard["argv"], stdin=subprocess.PIPE, text=True)
        assert process.stdin is not None
        with process.stdin as stdin:
            stdin.write(guard["stdin"])
        pidfd, ended = os.pidfd_open(process.pid), self._loop.create_future()
        self._loop.add_reader(pidfd, ended.set_result, None)
        await ended
        self._loop.remove_reader(pidfd)


class _OfThisUser(Connection):
    """A connection by a socket of this node, which is closed if another user is at its other end."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if peer_uid(transport.get_extra_info("socket")) != os.geteuid():
            self.close()


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, or the child that it has forked to train in its place (`run.forked_spare`)."""
    try:
        stat = read_stat(pid)
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split() if stat.name == SEED else []
    except OSError:
        return False
    return stat.state == "T" or any(is_stopped(int(child)) for child in children)  # "t" would be a debugger


def _cores(environment: dict[str, str]) -> list[int]:
    """The cores of a rank under Slurm, other ones for each. [] if there are too few, or it is unsaid how many."""
    per_rank, local = environment.get("SRUN_CPUS_PER_TASK", ""), environment["LOCAL_RANK"]
    if not per_rank.isdecimal():
        return []
    first = int(local) * int(per_rank)
    cores = sorted(os.sched_getaffinity(0))[first : first + int(per_rank)]
    return cores if len(cores) == int(per_rank) else []


def _kill_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
