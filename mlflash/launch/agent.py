"""The node agent: ``python -m mlflash.launch.agent [kept] LISTENER...``.

A trainer that starts it gives it sockets that listen already (`launch.agent_process`), so that nobody waits for it. It
ends when it has no trainer and no courier; one that is ``kept``, only after SIGTERM or SIGINT.

`mlflash run` gives it no socket, but a greeting, in the variable `launcher_variables.AGENT` or the first line of
standard input. It then has the ranks of its node, too (`rank_processes`), and ends when `mlflash run` needs it no more
and the last courier has ended. Trainers find it if the greeting has ``couriers``: the ``job`` and its ``memory``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from ..memory.process_names import AGENT as NAME
from .agent_process import kept_names, listen, name_for_commands, peer_uid
from .courier_process import ignore_signals_of_the_step
from .fork_server import ForkServer, Refused
from .handshake import Strangers
from .hub_connection import HubConnection
from .launcher_variables import AGENT
from .lines import BadLine, Connection, Lines
from .own_process import set_name
from .seat import Seat

if TYPE_CHECKING:
    from .rank_processes import RankProcesses

_LARGEST_NBYTES = 1 << 22  # of a first message, which contains an environment
_ALONE_S = 10.0  # limit for the first trainer to come
_COURIERS_S = 20.0  # limit for couriers to end when `mlflash run` has ended
_NO_MORE_S = 1.0  # until it accepts again after it had no descriptor for a connection
_DESCRIPTORS = 3


class Agent:
    """The process. Trainers connect to ``listeners``. ``is_kept``: whether it goes on without any."""

    def __init__(self, listeners: Sequence[socket.socket], is_kept: bool):
        self.forks = ForkServer()
        self._listeners, self._is_kept = listeners, is_kept
        self._seats: dict[int, Seat] = {}
        self._hub_connections: dict[tuple[tuple[str, int], str], HubConnection] = {}
        self._strangers = Strangers()
        self._numbers = 0
        self.move: Callable[[str, Callable[[str], None]], None] | None = None  # see `RankProcesses.move`
        self._over = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._report)
        for listener in listeners:
            listener.setblocking(False)
            self._listen(listener)
        if is_kept:
            for number in (signal.SIGTERM, signal.SIGINT):
                self._loop.add_signal_handler(number, self.release)
        self._alone: asyncio.TimerHandle | None = self._loop.call_later(_ALONE_S, self._end_if_alone)

    async def run(self) -> None:
        """Do what trainers ask, until the last one has gone."""
        await self._over.wait()
        self.forks.close()

    def hub_connection(self, address: tuple[str, int], token: str, size: int) -> HubConnection:
        key = address, token
        if key not in self._hub_connections or self._hub_connections[key].is_stale:
            self._hub_connections[key] = HubConnection(address, token, size, self._forget)
        return self._hub_connections[key]

    def _forget(self, connection: HubConnection) -> None:
        key = connection.address, connection.token
        if self._hub_connections.get(key) is connection:
            del self._hub_connections[key]

    def left(self, seat: Seat) -> None:
        """Forget a trainer, and end after the last one."""
        self._seats.pop(seat.number, None)
        self._end_if_alone()

    def _end_if_alone(self) -> None:
        self._alone = None
        if self._is_kept:
            return
        for listener in self._listeners:  # somebody may just have come
            self._accept(listener)
        if not self._seats and not self._strangers:
            self._over.set()

    def release(self) -> None:
        """End without trainers, from now on."""
        self._is_kept = False
        self._end_if_alone()

    def _report(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Let trainers log what went wrong here: the agent has no output of its own."""
        error = context.get("exception")
        shown = "".join(traceback.format_exception(error)) if error is not None else context["message"]
        for seat in self._seats.values():
            seat.log(f"the agent of this node failed: {shown}")

    # Who has not said yet who it is

    def _listen(self, listener: socket.socket) -> None:
        self._loop.add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError:  # there are no descriptors left
            self._loop.remove_reader(listener)
            self._loop.call_later(_NO_MORE_S, self._listen, listener)
            return
        if peer_uid(sock) != os.geteuid():
            sock.close()
            return
        self._strangers.add(_Stranger(self, sock))

    def met(self, stranger: _Stranger) -> None:
        """Forget a stranger: it has said who it is, or has gone."""
        self._strangers.forget(stranger)
        if not self._seats and not self._strangers and self._alone is None:
            self._alone = self._loop.call_later(_ALONE_S, self._end_if_alone)

    def hear(self, sock: socket.socket, hello: dict[str, Any], descriptors: list[int]) -> None:
        """Do what a first message says. The socket and the descriptors belong to this call."""
        if "channel" in hello:
            sock.setblocking(True)
            if (waiting := self._seats.get(hello["channel"])) is not None:
                waiting.channel(int(hello["number"])).set_result(sock)
            else:
                sock.close()
            return
        if "move" in hello:
            self._loop.create_task(self._move(sock, str(hello["move"]), int(hello["id"])))
            return
        self._numbers += 1
        seat: Seat | None = None
        try:
            seat = Seat(self, self._numbers, hello, descriptors)
        except (Refused, KeyError, TypeError, ValueError) as error:
            answer: dict[str, Any] = {"id": hello.get("id"), "error": str(error)}
            for descriptor in descriptors:
                os.close(descriptor)
        else:
            self._seats[seat.number] = seat
            answer = {"id": hello["id"], "is": {"seat": seat.number, "vendor": seat.vendor, "pid": os.getpid()}}
        self._loop.create_task(self._attach(sock, seat, answer))

    async def _move(self, sock: socket.socket, host: str, number: int) -> None:
        """Pass on a request that ranks leave a node."""
        connection = Connection(lambda message: None, lambda why: None, _LARGEST_NBYTES)
        await self._loop.connect_accepted_socket(lambda: connection, sock)

        def answer(why_not: str) -> None:
            connection.send({"id": number, "is": why_not})
            connection.end()

        if self.move is None:
            answer("`mlflash run` has not started the ranks of this job")
        else:
            self.move(host, answer)

    async def _attach(self, sock: socket.socket, seat: Seat | None, answer: dict[str, Any]) -> None:
        connection = Connection(lambda message: None, lambda why: None, _LARGEST_NBYTES)
        await self._loop.connect_accepted_socket(lambda: connection, sock)
        connection.send(answer)
        if seat is None:
            connection.end()
        else:
            seat.attach(connection)


class _Stranger:
    """A connection, until its first message is there."""

    def __init__(self, agent: Agent, sock: socket.socket):
        self._agent, self._sock, self._loop = agent, sock, asyncio.get_running_loop()
        self._lines, self._descriptors = Lines(_LARGEST_NBYTES), list[int]()
        sock.setblocking(False)
        self._loop.add_reader(sock, self._receive)

    def _receive(self) -> None:
        try:
            received, descriptors, _, _ = socket.recv_fds(self._sock, 1 << 16, _DESCRIPTORS)
        except BlockingIOError:
            return
        except OSError:
            received, descriptors = b"", []
        self._descriptors += descriptors
        try:
            hello = next(self._lines.add(received), None)
        except BadLine:
            hello, received = None, b""
        if not received or len(self._descriptors) > _DESCRIPTORS:
            self.close()
        elif isinstance(hello, dict):
            self._loop.remove_reader(self._sock)
            try:
                self._agent.hear(self._sock, hello, self._descriptors)
            except (KeyError, TypeError, ValueError, asyncio.InvalidStateError):  # nothing that a trainer says
                self._sock.close()
            finally:
                self._agent.met(self)

    def close(self) -> None:
        self._loop.remove_reader(self._sock)
        self._sock.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._agent.met(self)


async def _run(listeners: Sequence[socket.socket], is_kept: bool) -> None:
    await Agent(listeners, is_kept).run()


async def _run_with_ranks(listeners: Sequence[socket.socket], ranks: RankProcesses, greeting: dict[str, Any]) -> int:
    agent = Agent(listeners, is_kept=True)
    agent.move = ranks.move
    code = await ranks.serve(greeting)
    agent.release()
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(agent.run(), _COURIERS_S)
    return code


def _serve_run() -> int:
    """Be the agent of `mlflash run` on this node."""
    # Only here, because couriers have in memory what their agent has imported.
    from .rank_processes import RankProcesses

    text = os.environ.pop(AGENT, "") or sys.stdin.readline()
    greeting = {"host": os.environ.get("SLURMD_NODENAME", ""), **json.loads(text)}
    ranks, listeners = RankProcesses(), list[socket.socket]()
    set_name(NAME)
    with contextlib.ExitStack() as opened:
        if (couriers := greeting.get("couriers")) is not None:
            job, memory = couriers["job"], couriers["memory"]
            names = [name_for_commands(job, memory), *kept_names(memory, {**os.environ, "MLFLASH_JOB": job})]
            for name in names:
                listener = opened.enter_context(socket.socket(socket.AF_UNIX))
                with contextlib.suppress(OSError):  # another agent of this job: trainers find that one
                    listen(listener, name)
                    listeners.append(listener)
        return asyncio.run(_run_with_ranks(listeners, ranks, greeting))


def main(arguments: list[str]) -> NoReturn:
    """Be the agent of this node."""
    if not arguments:
        sys.exit(_serve_run())
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # who has started this process may have blocked some signals
    ignore_signals_of_the_step()
    set_name(NAME)
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (1, 2):  # whoever reads the output of the first trainer must not wait for the agent
        os.dup2(nothing, fd)
    is_kept = arguments[0] == "kept"
    with contextlib.ExitStack() as opened:
        listeners = [opened.enter_context(socket.socket(fileno=int(number))) for number in arguments[is_kept:]]
        for listener in listeners:
            listener.set_inheritable(False)
        asyncio.run(_run(listeners, is_kept))
    sys.exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
