"""Passes what MPI asks for after a barrier on from node to node, as a tree.

MPI asks on each node for the address of every node. One store that gives them out sends as many bytes as the square of
the nodes: it would take minutes for ten thousand. Where there are `LEAST_NODES` or more, it gives them to the first
nodes only. Each node has a small store of its own for `FAN_OUT` others, and has made known where it is below
``EPOCH/relay/NODE``; node n asks node (n - 1) // FAN_OUT. The store of a node has ``BARRIER/put/KEY`` and, once all of
them are there, ``BARRIER/all``, which those who ask wait for. A node whose MPI has not asked does so when another one
waits. Where the node above cannot be reached, the store of all is asked: slower, and right.

What a node has for a barrier is forgotten at the next one: who enters that has all answers.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Iterator, Sequence

from .key_value_store import KeyValueStore
from .own_address import speaking_to
from .process_mapping import numbered
from .store_client import StoreClient, Then

FAN_OUT = 16
LEAST_NODES = 64  # with fewer, the store of all has done it in less time than a level of the tree takes

Watch = tuple[int, int, Callable[[], None]]
"""A descriptor, what of select.poll to wait for, and what to do then."""


class AddressRelay:
    """One rank's part in it. Close it; it may be closed twice.

    Not collective. The first rank of each node takes part; any other asks the store of all.

    Args:
        epoch: the name of the world.
        rank: in it.
        nodes: the node of each rank, any numbers `(ranks)`.
        store: of all ranks.
    """

    def __init__(self, epoch: str, rank: int, nodes: Sequence[int], store: StoreClient):
        self._epoch, self._store = epoch, store
        self._barrier = 0  # the last one that all have passed
        self._known: dict[str, str] | None = None
        self._waiting: list[Then] = []
        self._above = ""  # the key of where the node above is
        self._asked: StoreClient | None = None  # the node above
        self._own: KeyValueStore | None = None  # what nodes below ask
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
        """Listen, at the address from which this host speaks to the store of all."""
        for host in speaking_to(self._store.address[0]):
            try:
                self._own = KeyValueStore(host, token=self._store.token)
            except OSError:  # those below ask the store of all
                return
            self._store.send(lambda *_: None, "put", self._place_of(node), f"{host} {self._own.address[1]}")

    def watches(self) -> Iterator[Watch]:
        """What is to be waited for. Not collective."""
        if self._asked is not None:
            yield self._asked.fileno(), self._asked.events, self._asked.step
        if self._own is not None:
            yield self._own.fileno(), select.POLLIN, self._serve

    def learn(self, then: Then) -> None:
        """Ask for all that was put before the last barrier, and have it given to ``then``. Not collective.

        It is given a dictionary of keys and values; more may be in it than was put before that barrier.
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
        """Note that all have passed a barrier: what was known before is of no use any more. Not collective."""
        self._barrier, self._known = number, None
        if self._own is not None:
            self._own.delete(f"{number - 1}/")
            self._learn_for_others()

    def close(self) -> None:
        """Close all connections. Not collective."""
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
        if not all(own.put(key, value) for key, value in told.items()):  # it is full: those below ask the store of all
            own.close()
            self._own = None
