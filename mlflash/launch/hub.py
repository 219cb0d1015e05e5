"""Where the nodes of a set of ranks meet: they agree on each epoch of their couriers here. It is in rank 0's agent.

The agent of each node has one connection, whose ends prove that they know the token (`handshake`). Messages of agents:

| message                                          | what happens                                                |
|--------------------------------------------------|-------------------------------------------------------------|
| ``{"id", "do": "seat", "rank", "member"}``       | answered ``{"id", "is": true}``: this agent has that rank   |
| ``{"do": "join", "rank", "last", "facts"}``      | the rank wants an epoch after number ``last``               |
| ``{"id", "do": "withdraw", "rank", "member",``   | it does not wait for one any more, whether it has joined or |
| ``"joined"}``                                    | was about to. Answered with the ranks that have not joined, |
|                                                  | [] if an epoch has begun                                    |
| ``{"do": "fence", "epoch", "number", "ranks",``  | so many ranks of the node have reached this fence of their  |
| ``"puts"}``                                      | MPI, and have put these keys and values before              |
| ``{"do": "over", "epoch"}``                      | a courier of the epoch has ended                            |
| ``{"do": "depart", "departure", "member"}``      | a rank has left the job permanently                         |
| ``{"do": "share", "key", "text"}``               | rank 0 gives a text to all                                  |
| ``{"id", "do": "shared", "key"}``                | answered with that text, as soon as there is one            |

Messages to all agents: ``{"epoch": {"name", "number", "blocks", "reads", "freed"}}`` when all ranks have joined;
``{"fenced": name, "number", "puts"}`` to the nodes of a fence that all ranks have reached; ``{"over": name}``, which
also follows if a rank takes its seat again; ``{"departed": departure}``.

``member`` is a word that a trainer has made for itself. A rank has one: another trainer that says it has that rank
comes from another launch, and is refused.
"""

from __future__ import annotations

import dataclasses
import secrets
import socket
from typing import Any

from .courier_mpi import can_all_read
from .handshake import STRANGERS, Port
from .lines import Connection, pack
from .pmi_server import blocks

_LARGEST_NBYTES = 1 << 26  # of a message: what the ranks of a node have put


def new_epoch_name(number: int) -> str:
    """Make a new, unique name of an epoch. Not collective: one process makes it for all."""
    return f"epoch-{number}-{secrets.token_hex(8)}"


@dataclasses.dataclass
class _Fence:
    """A point of the start of MPI that all ranks must reach before any goes on."""

    ranks: int = 0
    puts: dict[str, str] = dataclasses.field(default_factory=dict)
    nodes: list[Connection] = dataclasses.field(default_factory=list)


class Hub:
    """The place where so many ranks meet. It is driven by the event loop of the agent. Close it."""

    def __init__(self, size: int, token: str):
        self.size, self.token = size, token
        # All nodes connect at once, and those that were accepted first may send their token last.
        self._port = Port(token, self._welcome, _LARGEST_NBYTES, STRANGERS + size)
        self._seats: dict[int, tuple[Connection | None, str]] = {}  # rank → its node and its member
        self._joined: dict[int, tuple[int, list[Any]]] = {}
        self._epoch = ""
        self._fences: dict[int, _Fence] = {}
        self._departed: dict[str, Any] | None = None
        self._texts: dict[str, str] = {}
        self._asked: dict[str, list[tuple[Connection, int]]] = {}  # key → who waits for the text
        self._nodes: list[Connection] = []

    @property
    def address(self) -> tuple[str, int]:
        return self._port.address

    async def listen(self, listener: socket.socket) -> None:
        await self._port.listen(listener)

    def depart(self, departure: dict[str, Any]) -> None:
        """Tell all nodes that a rank has left the job. The first one is told again to whoever joins later."""
        self._departed = self._departed or departure
        self._tell_all({"departed": departure})

    def close(self) -> None:
        """End all connections when everything is sent."""
        self._port.close()
        for node in self._nodes:
            node.end()
        self._nodes = []

    # Nodes

    def _welcome(self, node: Connection, hello: dict[str, Any]) -> None:
        self._nodes.append(node)
        node.heard, node.lost = lambda message: self._take(node, message), lambda why: self._lose(node)

    def _lose(self, node: Connection) -> None:
        if node not in self._nodes:
            return
        self._nodes.remove(node)
        # The epoch goes on: if the whole node is lost, the others have nobody to begin another one with.
        for rank, (connection, member) in list(self._seats.items()):
            if connection is node:
                self._seats[rank] = None, member
                self._joined.pop(rank, None)

    def _take(self, node: Connection, message: dict[str, Any]) -> None:
        match message:
            case {"do": "seat", "id": number, "rank": int(rank), "member": str(member)}:
                node.send({"id": number} | self._seat(node, rank, member))
            case {"do": "join", "rank": int(rank), "last": int(last), "facts": list(facts)}:
                self._join(node, rank, last, facts)
            case {"do": "withdraw", "id": number, "rank": int(rank), "member": str(member), "joined": bool(joined)}:
                has_begun = not self._is_member(rank, member) or (self._joined.pop(rank, None) is None and joined)
                missing = [] if has_begun else sorted({*range(self.size)} - self._joined.keys() - {rank})
                node.send({"id": number, "is": missing})
            case {"do": "fence", "epoch": str(epoch), "number": int(number), "ranks": int(ranks), "puts": dict(puts)}:
                self._fence(node, epoch, number, ranks, puts)
            case {"do": "over", "epoch": str(epoch)}:
                self._end_epoch(epoch)
            case {"do": "depart", "departure": {"rank": int(rank), "why": str(), "ends_job": bool()} as departure,
                  "member": str(member)}:  # fmt: skip
                if self._is_member(rank, member):
                    self.depart(departure)
            case {"do": "share", "key": str(key), "text": str(text)}:
                self._texts[key] = text
                for asker, number in self._asked.pop(key, []):
                    asker.send({"id": number, "is": text})
            case {"do": "shared", "id": int(number), "key": str(key)}:
                if key in self._texts:
                    node.send({"id": number, "is": self._texts[key]})
                else:
                    self._asked.setdefault(key, []).append((node, number))
            case _:
                raise ValueError(f"no message of an agent: {str(message)[:80]}")

    def _is_member(self, rank: int, member: str) -> bool:
        """Whether this is a rank of this launch: an agent may still have one of the launch before."""
        return rank in self._seats and self._seats[rank][1] == member

    def _seat(self, node: Connection, rank: int, member: str) -> dict[str, Any]:
        if not 0 <= rank < self.size:
            return {"error": f"there are {self.size} ranks here, and no rank {rank}"}
        if rank in self._seats and not self._is_member(rank, member):
            return {"error": f"rank {rank} is there already: these are the ranks of another launch"}
        if rank in self._seats:  # its agent has died, with its courier, or has lost the connection
            self._end_epoch(self._epoch)
        self._seats[rank] = node, member
        return {"is": True}

    # Epochs

    def _join(self, node: Connection, rank: int, last: int, facts: list[Any]) -> None:
        if self._departed is not None:
            node.send({"departed": self._departed})
            return
        if self._seats.get(rank, (None, ""))[0] is not node:
            raise ValueError(f"rank {rank} has no seat on this node")
        self._joined[rank] = last, facts
        if len(self._joined) == self.size:
            self._begin()

    def _begin(self) -> None:
        """Begin an epoch, which all ranks want. Its number follows the last one that any of them knows."""
        joined = [self._joined[rank] for rank in range(self.size)]
        number = max(last for last, _ in joined) + 1
        numbers: dict[str, int] = {}
        nodes = [numbers.setdefault(node, len(numbers)) for _, (node, _, _) in joined]
        self._epoch, self._fences, self._joined = new_epoch_name(number), {}, {}
        self._tell_all({"epoch": {
            "name": self._epoch, "number": number, "blocks": blocks(nodes),
            "reads": can_all_read(nodes, [reach for _, (_, reach, _) in joined]),
            "freed": sorted({name for _, (_, _, freed) in joined for name in freed}),
        }})  # fmt: skip

    def _fence(self, node: Connection, epoch: str, number: int, ranks: int, puts: dict[str, str]) -> None:
        if epoch != self._epoch:  # it is over
            return
        fence = self._fences.setdefault(number, _Fence())
        fence.ranks += ranks
        fence.puts |= puts
        fence.nodes.append(node)
        if fence.ranks == self.size:
            del self._fences[number]
            line = pack({"fenced": epoch, "number": number, "puts": fence.puts})
            for node in fence.nodes:
                node.send_packed(line)

    def _end_epoch(self, epoch: str) -> None:
        if epoch and epoch == self._epoch:
            self._epoch, self._fences = "", {}
            self._tell_all({"over": epoch})

    def _tell_all(self, message: dict[str, Any]) -> None:
        line = pack(message)
        for node in self._nodes:
            node.send_packed(line)
