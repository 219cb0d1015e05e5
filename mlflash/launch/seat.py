"""A trainer, as the agent of its node sees it: what it asks for, and its couriers, one after the other.

The first message of its connection has, besides three descriptors (standard output, standard error, and a pidfd of the
trainer): ``entry`` (``module:function`` of its couriers), ``mpi`` (whether they may initialize MPI), ``environment``,
``directory``, ``umask``, ``cores`` (on which the trainer runs), ``pid`` and ``rank_cores`` (for `courier_cores`; "" if
couriers run on those of their trainers). It is answered with ``seat``, a number, ``vendor``, the MPI of couriers, and
``pid``, or with ``error``. Then come questions with ``id`` and ``do``:

| ``do``         | more fields                       | the answer                                                     |
|----------------|-----------------------------------|----------------------------------------------------------------|
| ``"serve"``    | ``hosts`` ``ports`` ``token``     | ``[host, port]``: rank 0's agent is the hub, at the first free |
|                | ``size``                          | port of the first host that is one of this machine             |
| ``"meet"``     | ``rank`` ``size`` ``member``      | ``[host, port]``: the hub has given the rank its seat, at the  |
|                | ``places`` ``token`` ``within_s`` | first of these places where it is                              |
| ``"next"``     | ``channel`` ``last`` ``facts``    | the epoch and the courier that was forked, see `_fork`, or     |
|                | ``within_s`` ``up_s``             | ``departed``                                                   |
| ``"withdraw"`` |                                   | it does not wait for the next epoch any more. The ranks that   |
|                |                                   | have not joined; null: the hub does not answer                 |
| ``"over"``     | ``epoch``                         | true; all ranks are told that it is over                       |
| ``"depart"``   | ``why`` ``ends_job``              | true; all ranks are told that this one leaves                  |
| ``"share"``    | ``key`` ``text``                  | the text of rank 0, which only that rank gives                 |
| ``"kill"``     |                                   | true; then ``ended`` follows, if there is a courier            |
| ``"close"``    | ``tells``                         | true, when the courier has ended                               |

For a courier, the trainer makes another connection, whose first message is ``{"channel": seat, "number"}``. It sends
nothing on it before the answer to ``next``, which names that number. News: ``{"up": epoch}`` when the courier's MPI is
initialized, ``{"ended": epoch, "status", "signal", "why"}``, ``{"over": epoch}``, ``{"departed": departure}``,
``{"lost": why}`` (the hub), and ``{"log": text}``.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import socket
from typing import TYPE_CHECKING, Any

from ..memory.process_names import name_of_courier
from . import courier_cores
from .courier_process import CourierEnd, Inherited
from .fork_server import ENDS_S, ForkedCourier, Order, Refused
from .handshake import STRANGERS
from .hub import Hub, new_epoch_name
from .hub_connection import Departed, Epoch, HubConnection, HubLost, NobodyThere
from .lines import Connection, listener_at
from .own_process import allow

if TYPE_CHECKING:
    from .agent import Agent

_OTHER_DESCRIPTORS = 192  # of an agent that is a hub, besides one for each node
_CHANNEL_S = 10.0  # limit for the connection of a courier to come
_ASKED_S = 5.0  # limit for the hub to answer what is missing
_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.2  # between two attempts to find the hub
_ATTEMPT_S = 1.0  # limit for the first one at each place; then twice as long each time


class Seat:
    """A trainer. Its owner is the agent; ``number`` is what it calls this seat."""

    def __init__(self, agent: Agent, number: int, hello: dict[str, Any], descriptors: list[int]):
        self.number, self._agent, self._loop = number, agent, asyncio.get_running_loop()
        out, err, self._trainer_pidfd = descriptors
        self._output, self._hello = (out, err), hello
        self.vendor = agent.forks.prepare(hello["entry"], hello["mpi"])
        self.rank, self.member, self.cores = 0, "", str(hello["rank_cores"])
        self._channels: dict[int, asyncio.Future[socket.socket]] = {}  # by number: to its couriers
        self._connection: Connection | None = None
        self._to_hub: HubConnection | None = None
        self._hub: Hub | None = None
        self._next: asyncio.Future[Epoch] | None = None  # the epoch that the trainer waits for
        self._wanted = 0  # the channel of the courier that it waits for
        self._has_joined = False  # the epoch of that courier
        self._courier: ForkedCourier | None = None
        self._courier_ended = asyncio.Event()
        self._epoch = ""  # the last one
        self._has_departed = self._is_over = self._has_left = False
        self._tells = True
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop.add_reader(self._trainer_pidfd, self._lose_trainer, "it has ended")

    def attach(self, connection: Connection) -> None:
        self._connection = connection
        connection.heard, connection.lost = self._take, self._lose_trainer

    def _take(self, message: dict[str, Any]) -> None:
        task = self._loop.create_task(self._answer(message["id"], message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, number: int, message: dict[str, Any]) -> None:
        do = getattr(self, f"do_{message.get('do')}", None)
        fields = {name: value for name, value in message.items() if name not in ("id", "do")}
        try:
            if do is None:
                raise Refused("it does not know how")
            answer = {"is": await do(**fields)}
        except Departed as error:
            answer = {"is": {"departed": error.departure}}
        except HubLost as error:
            answer = {"error": str(error), "lost": True}
        except (Refused, OSError, LookupError, TypeError, ValueError) as error:
            answer = {"error": str(error)}
        self._say({"id": number, **answer})

    def _say(self, message: dict[str, Any]) -> None:
        if self._connection is not None:
            self._connection.send(message)

    def log(self, text: str) -> None:
        self._say({"log": text})

    # The hub

    async def do_serve(self, hosts: list[str], ports: list[int], token: str, size: int) -> list[Any]:
        if why_not := allow(size + _OTHER_DESCRIPTORS + STRANGERS):
            raise Refused(f"the agent of rank 0 {why_not}")
        why: OSError | None = None
        for host, port in ((host, port) for host in hosts for port in ports):
            try:
                listener = listener_at(host, port)
            except OSError as error:
                why = error
                continue
            self._hub = Hub(size, token)
            await self._hub.listen(listener)
            return [host, self._hub.address[1]]
        raise Refused(f"it cannot listen at {', '.join(hosts) or 'any address'}: {why}")

    async def do_meet(self, rank: int, size: int, member: str, places: list[list[Any]], token: str, within_s: float
                      ) -> list[Any]:  # fmt: skip
        self.rank, self.member = rank, member
        end, pause_s, limit_s, why = self._loop.time() + within_s, _PAUSE_S, _ATTEMPT_S, ""
        while self._loop.time() < end:
            for host, port in places:
                to_hub = self._agent.hub_connection((host, port), token, size)
                try:
                    await asyncio.wait_for(to_hub.enter(self), max(0.0, min(limit_s, end - self._loop.time())))
                    if self._is_over:
                        to_hub.leave(self)
                    self._to_hub = to_hub
                    return [host, port]
                except NobodyThere as error:
                    why = why or str(error)
                except (HubLost, Refused, asyncio.TimeoutError) as error:
                    why = str(error) or f"{to_hub} does not answer"
            await asyncio.sleep(pause_s)
            pause_s, limit_s = min(2 * pause_s, _LONGEST_PAUSE_S), 2 * limit_s
        raise HubLost(why)

    async def do_share(self, key: str, text: str | None) -> str:
        to_hub = self._hub_connection()
        if text is not None:
            to_hub.tell("share", key=key, text=text)
            return text
        shared: str = await to_hub.ask("shared", key=key)
        return shared

    async def do_over(self, epoch: str) -> bool:
        self._end_epoch(epoch)
        return True

    def _end_epoch(self, epoch: str) -> None:
        if self._to_hub is None:
            self.over(epoch)
        else:
            self._to_hub.tell("over", epoch=epoch)

    async def do_depart(self, why: str, ends_job: bool) -> bool:
        if not self._depart(why, ends_job):
            raise HubLost("there is no connection to the hub")
        return True

    def _depart(self, why: str, ends_job: bool) -> bool:
        departure = {"rank": self.rank, "why": why, "ends_job": ends_job}
        if self._hub is not None:
            self._hub.depart(departure)
        elif self._to_hub is not None and not self._to_hub.tell("depart", departure=departure, member=self.member):
            return False
        self._has_departed = True
        return True

    def _hub_connection(self) -> HubConnection:
        if self._to_hub is None:
            raise Refused("this rank has not met the others")
        return self._to_hub

    # Epochs

    async def do_next(self, channel: int, last: int, facts: list[Any], within_s: float, up_s: float) -> dict[str, Any]:
        end, self._wanted, self._has_joined = self._loop.time() + within_s, channel, False
        await self._end_courier()
        self._check_wanted(channel)
        if self._to_hub is None:
            epoch = Epoch(new_epoch_name(last + 1), last + 1, (0,), True, facts[2])
        else:
            epoch = await self._join(self._to_hub, last, facts, end)
        try:
            with await asyncio.wait_for(self.channel(channel), _CHANNEL_S) as sock:
                self._drop_channels(channel)
                self._check_wanted(channel)
                return self._fork(epoch, sock, up_s)
        except BaseException as error:  # the other ranks must not wait for its MPI
            self._end_epoch(epoch.name)
            if isinstance(error, asyncio.TimeoutError):
                raise Refused("its connection for the courier has not come") from None
            raise

    def _check_wanted(self, channel: int) -> None:
        if self._is_over:
            raise Refused("its trainer has ended")
        if self._wanted != channel:  # while it was about to join, or to be forked
            raise Refused("it was withdrawn")

    def channel(self, number: int) -> asyncio.Future[socket.socket]:
        """The connection of the trainer for a courier, when it has come."""
        return self._channels.setdefault(number, self._loop.create_future())

    def _drop_channels(self, last: int) -> None:
        """Forget connections up to a number, and close those that no courier has had."""
        for number in [number for number in self._channels if number <= last]:
            channel = self._channels.pop(number)
            if channel.done() and not channel.cancelled() and number < last:
                channel.result().close()

    async def _join(self, to_hub: HubConnection, last: int, facts: list[Any], end: float) -> Epoch:
        while True:
            if to_hub.departed is not None:
                raise Departed(to_hub.departed)
            beginning: asyncio.Future[Epoch] = self._loop.create_future()
            self._next = beginning
            try:
                await to_hub.connected(end)
                if not beginning.done():  # the loss of the hub before it was connected again
                    to_hub.tell("join", rank=self.rank, last=last, facts=facts)
                    self._has_joined = True
                return await beginning
            except HubLost:
                if self._loop.time() >= end:
                    raise
            finally:
                if self._next is beginning:
                    self._next = None

    def _fork(self, epoch: Epoch, channel: socket.socket, up_s: float) -> dict[str, Any]:
        cores = self._choose_cores()
        hello, name = self._hello, epoch.name
        environment = hello["environment"] | self._agent.forks.mpi_environment
        inherited = Inherited(channel, self._trainer_pidfd, name_of_courier(hello["pid"]), self._output, environment,
                              hello["directory"], hello["umask"], frozenset(hello["cores"]))  # fmt: skip
        order = Order(hello["entry"], name, self.rank, epoch.nodes, epoch.reads, cores, up_s, inherited)
        self._courier = self._agent.forks.fork(order, epoch.here, self._note_up, self._note_end)
        self._courier_ended.clear()
        self._epoch = name
        return {"epoch": name, "number": epoch.number, "nodes": [*epoch.nodes], "freed": epoch.freed,
                "pid": self._courier.pid, "cores": sorted(cores)}  # fmt: skip

    def _choose_cores(self) -> frozenset[int]:
        """Choose the cores of the next courier. If they are unknown or invalid, it runs where its trainer does."""
        seats = self._to_hub.seats if self._to_hub is not None else {self.rank: self}
        with contextlib.suppress(ValueError):
            if self.cores:
                texts = {rank: seat.cores for rank, seat in seats.items() if seat.cores}
                return courier_cores.choose_among(texts, self.rank) or frozenset()
        return frozenset()

    @property
    def _waiting(self) -> asyncio.Future[Epoch] | None:
        """The wait of the trainer for an epoch that has not begun."""
        return self._next if self._next is not None and not self._next.done() else None

    def begin(self, epoch: Epoch) -> None:
        """Note that an epoch has begun. If the trainer waits no more for it, it is over for all."""
        if (waiting := self._waiting) is not None:
            self._epoch = epoch.name
            waiting.set_result(epoch)
        else:
            self._end_epoch(epoch.name)

    def over(self, epoch: str) -> None:
        if epoch == self._epoch:
            self._say({"over": epoch})

    def departed(self, departure: dict[str, Any]) -> None:
        if (waiting := self._waiting) is not None:
            waiting.set_exception(Departed(departure))
        self._say({"departed": departure})

    def hub_lost(self, lost: HubLost) -> None:
        if (waiting := self._waiting) is not None:
            waiting.set_exception(lost)
        else:
            self._say({"lost": str(lost)})

    async def do_withdraw(self) -> list[int] | None:
        to_hub, self._wanted = self._hub_connection(), 0
        if (waiting := self._waiting) is not None:
            waiting.set_exception(Refused("it was withdrawn"))
        elif self._running is not None:  # the epoch had just begun
            self._running.kill()
            self._end_epoch(self._epoch)
        with contextlib.suppress(HubLost, asyncio.TimeoutError):
            asked = to_hub.ask("withdraw", rank=self.rank, member=self.member, joined=self._has_joined)
            missing: list[int] = await asyncio.wait_for(asked, _ASKED_S)
            return missing
        return None

    # The courier

    def _note_up(self) -> None:
        self._say({"up": self._epoch})

    def _note_end(self, end: CourierEnd) -> None:
        self._courier_ended.set()
        self._say({"ended": self._epoch, **dataclasses.asdict(end)})
        if self._is_over:
            self._leave()

    @property
    def _running(self) -> ForkedCourier | None:
        """The courier, if it has not ended."""
        return self._courier if self._courier is not None and self._courier.end is None else None

    async def _end_courier(self) -> None:
        if self._running is not None:
            self._running.kill()
            await self._courier_ended.wait()

    async def do_kill(self) -> bool:
        if self._running is not None:
            self._running.kill()
        return True

    async def do_close(self, tells: bool) -> bool:
        self._tells = tells
        if self._courier is not None:
            await self._courier_ended.wait()
        return True

    # The end

    def _lose_trainer(self, why: str) -> None:
        """Let the courier end, and then leave: its trainer has ended, or does not need this seat any more."""
        if self._is_over:
            return
        self._is_over = True
        self._loop.remove_reader(self._trainer_pidfd)
        if self._connection is not None:
            self._connection.close()
        for task in list(self._tasks):
            task.cancel()
        if self._running is not None:
            self._running.end_within(ENDS_S, f"its trainer ended {ENDS_S:g} s ago")
        else:
            self._leave()

    def _leave(self) -> None:
        if self._has_left:
            return
        self._has_left = True
        if self._tells and self._epoch and not self._has_departed:
            self._depart("its process has ended", ends_job=False)
        if self._to_hub is not None:
            self._to_hub.leave(self)
        if self._hub is not None:
            self._hub.close()
        self._drop_channels(max(self._channels, default=0) + 1)
        for fd in (*self._output, self._trainer_pidfd):
            os.close(fd)
        self._agent.left(self)
