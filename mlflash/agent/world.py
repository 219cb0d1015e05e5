"""The ranks of this node that meet others at one hub: one connection to it, whatever their number."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from ..wireup.lines import Connection
from ..wireup.process_mapping import Block, nodes_of
from .fork_server import Refused
from .pmi_server import Fence, NodeEpoch

if TYPE_CHECKING:
    from .seat import Seat

_LARGEST_NBYTES = 1 << 28  # of a message: what all ranks have put
_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.2  # between two attempts to connect
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


class Begun(NamedTuple):
    """An epoch, as all nodes are told."""

    name: str
    number: int
    nodes: tuple[int, ...]  # of each rank
    reads: bool
    freed: list[str]
    here: NodeEpoch | None = None  # None: a job of one rank, without MPI


class World:
    """The connection of a node to one hub, and what its ranks there share.

    Args:
        size: number of ranks that meet.
        empty: called when no rank of this node is left.
    """

    def __init__(self, address: tuple[str, int], token: str, size: int, empty: Callable[[World], None]):
        self.address, self.token, self.size = address, token, size
        self.seats: dict[int, Seat] = {}
        self._empty = empty
        self._link: Connection | None = None
        self._connecting = asyncio.Lock()
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._epoch: NodeEpoch | None = None
        self._departed: dict[str, Any] | None = None

    def __str__(self) -> str:
        return f"{self.address[0]} port {self.address[1]}"

    # The hub

    async def enter(self, seat: Seat) -> None:
        """Give a rank its seat at the hub. Raises HubLost; Refused: another launch has it."""
        self.seats[seat.rank] = seat
        try:
            async with self._connecting:
                await self._connect()
            await self._take_seat(seat)
        except BaseException:
            self.leave(seat)
            raise

    async def connected(self, end: float) -> None:
        """Wait until the hub is connected, and all ranks of this node have their seats there.

        ``end``: by the clock of the loop. Raises HubLost: it is not there in time. It may be just restarting.
        """
        pause_s, loop = _PAUSE_S, asyncio.get_running_loop()
        while True:
            try:
                async with self._connecting:
                    if self._link is None:
                        await self._connect()
                        for seat in list(self.seats.values()):
                            await self._take_seat(seat)
                return
            except HubLost as lost:
                if loop.time() >= end:
                    hint = f"; {_ONLY_HERE}" if self.address[0].startswith("127.") else ""
                    raise HubLost(f"{lost}{hint}") from lost
            await asyncio.sleep(max(0.0, min(pause_s, end - loop.time())))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _connect(self) -> None:
        if self._link is not None:
            return
        link = Connection(self._take, self._lose, _LARGEST_NBYTES)
        try:
            transport, _ = await asyncio.get_running_loop().create_connection(lambda: link, *self.address)
        except OSError as error:
            raise NobodyThere(f"nobody listens at {self}: {error.strerror or error}") from None
        sock = transport.get_extra_info("socket")
        if sock.getsockname() == sock.getpeername():  # TCP can connect a port to itself
            link.close()
            raise NobodyThere(f"nobody listens at {self}")
        self._link = link
        link.send({"token": self.token})

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
            told = await answer
        finally:
            self._asked.pop(number, None)
        if "error" in told:
            raise Refused(told["error"])
        return told["is"]

    def tell(self, what: str, **fields: Any) -> None:
        """Tell the hub something. It is dropped if there is no connection: whoever needs it notices the loss."""
        if self._link is not None:
            self._link.send({"do": what, **fields})

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
            self._departed = self._departed or message["departed"]
            for seat in list(self.seats.values()):
                seat.departed(message["departed"])

    def _lose(self, why: str) -> None:
        self._link = None
        lost = HubLost(f"no connection to {self}: {why}")
        for waiting in self._asked.values():
            if not waiting.done():
                waiting.set_exception(lost)
        if self._departed is None:
            for seat in list(self.seats.values()):
                seat.hub_lost(lost)

    # Epochs

    def _begin(self, name: str, number: int, blocks: list[list[int]], reads: bool, freed: list[str]) -> None:
        nodes = tuple(nodes_of([Block(*block) for block in blocks], self.size))
        here = list(self.seats.values())
        count = len(here)
        fence: Fence = lambda barrier, puts: self.tell("fence", epoch=name, number=barrier, ranks=count, puts=puts)
        self._epoch = NodeEpoch(name, nodes, count, fence)
        for seat in here:
            seat.begin(Begun(name, number, nodes, reads, freed, self._epoch))

    def leave(self, seat: Seat) -> None:
        """Forget a rank of this node, and the hub with the last one."""
        if self.seats.get(seat.rank) is seat:
            del self.seats[seat.rank]
        if not self.seats:
            if self._link is not None:
                self._link.end()
                self._link = None
            self._empty(self)
