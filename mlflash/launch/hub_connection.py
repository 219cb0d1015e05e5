"""The ranks of this node that meet others at one hub: one connection to it, whatever their number."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from .fork_server import Refused
from .handshake import introduce
from .lines import Connection
from .pmi_server import Block, NodeEpoch, nodes_of

if TYPE_CHECKING:
    from .seat import Seat

_LARGEST_NBYTES = 1 << 28  # of a message: what all ranks have put
_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.2  # between two attempts to connect
_ATTEMPT_S = 5.0  # limit for one
_ONLY_HERE = (
    "this is an address of each host's own. If rank 0 is on another host, that found no address of its own to name: "
    "MLFLASH_INTERFACE says which interface to use"
)


class HubLost(ConnectionError):
    """The hub cannot be reached, or no longer."""


class NobodyThere(HubLost):
    """Nobody listens where the hub may be."""


class Departed(Exception):
    """A rank has left the job, so there is no next epoch: ``departure`` says which and why."""

    def __init__(self, departure: dict[str, Any]):
        super().__init__(str(departure))
        self.departure = departure


class Epoch(NamedTuple):
    """An epoch, as all nodes are told."""

    name: str
    number: int
    nodes: tuple[int, ...]  # of each rank
    reads: bool
    freed: list[str]
    here: NodeEpoch | None = None  # None: a job of one rank, without MPI


class HubConnection:
    """The connection of a node to one hub, and what its ranks there share.

    Args:
        size: number of ranks that meet.
        empty: called when no rank of this node is left.
    """

    def __init__(self, address: tuple[str, int], token: str, size: int, empty: Callable[[HubConnection], None]):
        self.address, self.token, self.size = address, token, size
        self.seats: dict[int, Seat] = {}
        self._empty = empty
        self._link: Connection | None = None
        self._connecting = asyncio.Lock()
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._epoch: NodeEpoch | None = None
        self.departed: dict[str, Any] | None = None  # the first departure that was told
        self._has_been_connected = False

    def __str__(self) -> str:
        return f"{self.address[0]} port {self.address[1]}"

    # The hub

    @property
    def is_stale(self) -> bool:
        """Whether its hub was lost. At its address there may be that of another launch by now."""
        return self._has_been_connected and self._link is None

    async def enter(self, seat: Seat) -> None:
        """Give a rank its seat at the hub. Raises HubLost; Refused: another launch has it."""
        try:
            async with self._connecting:
                await self._connect()
            await self._take_seat(seat)
            self.seats[seat.rank] = seat
        finally:
            self._look_empty()

    async def connected(self, end: float) -> None:
        """Wait until the hub is connected, and all ranks of this node have their seats there.

        ``end``: by the clock of the loop. Raises HubLost: it is not there in time. It may be just restarting.
        """
        pause_s, loop = _PAUSE_S, asyncio.get_running_loop()
        while True:
            try:
                await asyncio.wait_for(self._connect_seats(), min(_ATTEMPT_S, max(0.0, end - loop.time())))
                return
            except (HubLost, asyncio.TimeoutError) as lost:
                if loop.time() >= end:
                    hint = f"; {_ONLY_HERE}" if self.address[0].startswith("127.") else ""
                    raise HubLost(f"{lost}{hint}") from lost
            await asyncio.sleep(max(0.0, min(pause_s, end - loop.time())))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _connect_seats(self) -> None:
        async with self._connecting:
            if self._link is None:
                await self._connect()
                for seat in list(self.seats.values()):
                    await self._take_seat(seat)

    async def _connect(self) -> None:
        if self._link is not None:
            return
        loop, link = asyncio.get_running_loop(), Connection(self._take, self._lose, _LARGEST_NBYTES)
        try:
            # The loop would look a name up on a thread, and a process with threads cannot fork couriers.
            (family, kind, protocol, _, (host, *rest)), *_ = socket.getaddrinfo(
                *self.address, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
            )
            with contextlib.ExitStack() as failed:
                sock = failed.enter_context(socket.socket(family, kind, protocol))
                sock.setblocking(False)
                await loop.sock_connect(sock, (str(host).partition("%")[0], *rest))
                await loop.create_connection(lambda: link, sock=sock)
                failed.pop_all()
        except OSError as error:
            raise NobodyThere(f"nobody listens at {self}: {error.strerror or error}") from None
        try:
            await introduce(link, self.token)
        except ConnectionError as error:
            raise HubLost(f"whoever listens at {self} is not the hub of this launch: {error}") from None
        self._link, self._has_been_connected = link, True

    async def _take_seat(self, seat: Seat) -> None:
        await self.ask("seat", rank=seat.rank, member=seat.member)

    async def ask(self, what: str, **fields: Any) -> Any:
        """Ask the hub something. Raises HubLost, or Refused."""
        if self._link is None:
            raise HubLost(f"no connection to {self}")
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self._link.send({"id": number, "do": what, **fields})
        try:
            reply = await answer
        finally:
            self._asked.pop(number, None)
        if "error" in reply:
            raise Refused(reply["error"])
        return reply["is"]

    def tell(self, what: str, **fields: Any) -> bool:
        """Tell the hub something. Return whether there is a connection: whoever needs it notices the loss."""
        if self._link is not None:
            self._link.send({"do": what, **fields})
        return self._link is not None

    def _take(self, message: dict[str, Any]) -> None:
        if "id" in message:
            if (waiting := self._asked.get(message["id"])) is not None and not waiting.done():
                waiting.set_result(message)
        elif "epoch" in message:
            self._begin(**message["epoch"])
        elif "fenced" in message:
            if self._epoch is not None and self._epoch.name == message["fenced"]:
                self._epoch.fenced(message["number"], message["puts"])
        elif "over" in message:
            for seat in list(self.seats.values()):
                seat.over(message["over"])
        elif "departed" in message:
            self.departed = self.departed or message["departed"]
            for seat in list(self.seats.values()):
                seat.departed(message["departed"])

    def _lose(self, why: str) -> None:
        self._link = None
        lost = HubLost(f"no connection to {self}: {why}")
        for waiting in self._asked.values():
            if not waiting.done():
                waiting.set_exception(lost)
        if self.departed is None:
            for seat in list(self.seats.values()):
                seat.hub_lost(lost)

    # Epochs

    def _begin(self, name: str, number: int, blocks: list[list[int]], reads: bool, freed: list[str]) -> None:
        nodes = tuple(nodes_of([Block(*block) for block in blocks], self.size))
        here = list(self.seats.values())
        count = len(here)

        def fence(barrier: int, puts: dict[str, str]) -> None:
            self.tell("fence", epoch=name, number=barrier, ranks=count, puts=puts)

        self._epoch = NodeEpoch(name, nodes, count, fence)
        for seat in here:
            seat.begin(Epoch(name, number, nodes, reads, freed, self._epoch))

    def leave(self, seat: Seat) -> None:
        """Forget a rank of this node, and the hub with the last one."""
        if self.seats.get(seat.rank) is seat:
            del self.seats[seat.rank]
            self.tell("withdraw", id=0, rank=seat.rank, member=seat.member, joined=False)
        self._look_empty()

    def _look_empty(self) -> None:
        if not self.seats:
            if self._link is not None:
                self._link.end()
                self._link = None
            self._empty(self)
