"""Passes the addresses that MPI asks for after a barrier from node to node, as a tree.

MPI asks on each node for the address of every node. A single store that answers all sends a number of bytes that grows
with the square of the number of nodes. For ten thousand nodes this takes minutes. With `LEAST_NODES` or more, the
store answers the first nodes only. Each node has a small store of its own for `FAN_OUT` others, and publishes its
address below ``EPOCH/relay/NODE``; node n asks node (n - 1) // FAN_OUT. The store of a node has ``BARRIER/put/KEY``
and, once all of them are there, ``BARRIER/all``, for which its clients wait. If the MPI of a node has not asked yet,
the node asks as soon as another one waits. If the node above cannot be reached, the store of all is asked, which is
slower.

A node forgets what it has for a barrier at the next one: a process that enters that one has all its answers.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Iterator, Sequence

from .key_value_store import KeyValueStore
from .own_address import speaking_to
from .process_mapping import numbered
from .store_client import StoreClient, Then

FAN_OUT = 16
LEAST_NODES = 64  # with fewer nodes, the store of all is faster than one level of the tree

Watch = tuple[int, int, Callable[[], None]]
"""A descriptor, the events of select.poll to wait for, and what to call then."""


class AddressRelay:
    """One rank's part in the tree. Close it; it may be closed twice.

    The first rank of each node takes part; any other asks the store of all.

    Args:
        epoch: the name of the world.
        rank: in that world.
        nodes: the node of each rank, any numbers `(ranks)`.
        store: of all ranks.
    """

    def __init__(self, epoch: str, rank: int, nodes: Sequence[int], store: StoreClient):
        self._epoch, self._store = epoch, store
        self._barrier = 0  # the last one that all ranks have passed
        self._known: dict[str, str] | None = None
        self._waiting: list[Then] = []
        self._above = ""  # the key of the address of the node above
        self._asked: StoreClient | None = None  # to the node above
        self._own: KeyValueStore | None = None  # for the nodes below
        numbers = numbered(nodes)
        node, count = numbers[rank], max(numbers) + 1
        if count < LEAST_NODES or numbers.index(node) != rank:
            return
        if node > FAN_OUT:
            self._above = self._place_of((node - 1) // FAN_OUT)
        if node * FAN_OUT + 1 < count:
            self._open(node)

    def _place_of(self, node: int) -> str:
        return f"{self._epoch}/relay/{node}"

    def _open(self, node: int) -> None:
        """Listen at the address from which this host reaches the store of all."""
        for host in speaking_to(self._store.address[0]):
            try:
                self._own = KeyValueStore(host, token=self._store.token)
            except OSError:  # the nodes below ask the store of all
                return
            self._store.send(lambda *_: None, "put", self._place_of(node), f"{host} {self._own.address[1]}")

    def watches(self) -> Iterator[Watch]:
        """What to wait for."""
        if self._asked is not None:
            yield self._asked.fileno(), self._asked.events, self._asked.step
        if self._own is not None:
            yield self._own.fileno(), select.POLLIN, self._serve

    def learn(self, then: Then) -> None:
        """Ask for everything that was put before the last barrier, and call ``then`` with it.

        It gets a dictionary of keys and values. This may also contain what was put later.
        """
        if self._known is not None:
            then(self._known, None)
            return
        self._waiting.append(then)
        if len(self._waiting) > 1:
            return
        if self._above and self._barrier:
            self._store.send(self._ask_above, "look", self._above)
        else:
            self._ask_all()

    def pass_barrier(self, number: int) -> None:
        """Note that all ranks have passed a barrier, and forget what was known before it."""
        self._barrier, self._known = number, None
        if self._own is not None:
            self._own.delete(f"{number - 1}/")
            self._learn_for_others()

    def close(self) -> None:
        """Close all connections."""
        for one in (self._asked, self._own):
            if one is not None:
                one.close()
        self._asked = self._own = None

    def _serve(self) -> None:
        if self._own is not None:
            self._own.step()
            self._learn_for_others()

    def _learn_for_others(self) -> None:
        if self._own is not None and self._known is None and self._own.awaits(f"{self._barrier}/all"):
            self.learn(lambda *_: None)

    def _ask_all(self) -> None:
        self._store.send_below(self._learnt, f"{self._epoch}/put/")

    def _ask_above(self, place: str | None, error: OSError | None) -> None:
        if place is None or error is not None:
            self._ask_all()
            return
        host, port = place.split()
        above = self._asked = StoreClient((host, int(port)), self._store.token)

        def is_there(_: object, error: OSError | None) -> None:
            if error is None:
                above.send_below(told, f"{self._barrier}/put/")
            else:
                self._ask_all()

        def told(known: dict[str, str] | None, error: OSError | None) -> None:
            if error is None:
                self._learnt(known, None)
                above.close()
            else:
                self._ask_all()

        above.send(is_there, "get", f"{self._barrier}/all")

    def _learnt(self, known: dict[str, str] | None, error: OSError | None) -> None:
        self._known = known
        if self._own is not None and known is not None and self._barrier:
            self._pass_on(self._own, known)
        waiting, self._waiting = self._waiting, []
        for then in waiting:
            then(known, error)

    def _pass_on(self, own: KeyValueStore, known: dict[str, str]) -> None:
        told = {f"{self._barrier}/put/{key}": known[key] for key in sorted(known)} | {f"{self._barrier}/all": ""}
        if not all(own.put(key, value) for key, value in told.items()):  # full: the nodes below ask the store of all
            own.close()
            self._own = None
