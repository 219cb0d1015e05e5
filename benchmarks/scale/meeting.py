"""Collectives and messages of the live ranks of a simulated world, and the MPI requests of both.

`simulated_mpi` explains live ranks and phantoms.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Phantoms = Callable[[str, int], Sequence[bytes | None] | None]
"""Gives what each rank contributes to a gather. Takes the name of the communicator, and the number of bytes of the live
rank that contributes least. Where the result or the entry of a rank is None, a live rank contributes its own value, and
a phantom contributes that of the live rank with least bytes.
"""


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a live rank that sends something.

    Attributes:
        comm: name of the communicator.
        what: name of the function. "Isend" and "Rput" are messages, all others are collectives.
        nbytes: bytes that this rank contributes.
        received: bytes that this rank receives from a gather or broadcast.
    """

    rank: int
    comm: str
    what: str
    nbytes: int
    received: int = 0


@dataclasses.dataclass(frozen=True)
class Made:
    """A communicator or a window that a live rank has created and not freed.

    Attributes:
        what: "communicator" or "window".
        size: number of its ranks.
    """

    rank: int
    what: str
    size: int


class Fabric:
    """State that the live ranks of one world share.

    Args:
        size: number of ranks of the world.
        per_node: ranks on each node.
        live: the ranks that run.
        splits: what each split of the world gives, in the order of the calls: "node", "leaders", "all" or "group". A
            group consists of the live ranks.
        phantoms: gives what phantoms contribute to a gather.

    Attributes:
        answers: what phantoms contribute to the next gathers of a communicator, used before ``phantoms`` is called.
        made_up_s: CPU seconds spent on generating these values. No rank of a real job spends them.
        asked: what each live rank asked the directory for, and how often.
        sizes: sizes of the files that phantoms would have written.
        olds: the ranks of the written checkpoint, see `phantoms.Olds`.
        alone_s: CPU seconds of the first rank for what it did alone while a drain was committed.
    """

    def __init__(self, size: int, per_node: int, live: Sequence[int], splits: Sequence[str], phantoms: Phantoms):
        self.size, self.per_node, self.live, self.splits = size, per_node, tuple(live), tuple(splits)
        self.phantoms = phantoms
        self.calls: list[Call] = []
        self.made: list[Made] = []
        self.answers: dict[str, collections.deque[Callable[[], Sequence[bytes | None]]]]
        self.answers = collections.defaultdict(collections.deque)
        self.asked: dict[int, collections.Counter[tuple[str, str]]] = collections.defaultdict(collections.Counter)
        self.sizes: dict[str, int] = {}
        self.olds: Any = None
        self.made_up_s = self.alone_s = 0.0
        self.lock = threading.RLock()
        self.met: dict[tuple[object, ...], dict[int, Any]] = {}
        self.results: dict[tuple[object, ...], Any] = {}
        self.mail: dict[tuple[object, ...], collections.deque[bytes]] = collections.defaultdict(collections.deque)
        self.posted: dict[tuple[object, ...], collections.deque[Receive]] = collections.defaultdict(collections.deque)

    def members(self, kind: str, rank: int) -> Sequence[int]:
        """Give the ranks of a communicator, in its order."""
        node = rank - rank % self.per_node
        return {"node": range(node, node + self.per_node), "leaders": range(0, self.size, self.per_node),
                "all": range(self.size), "group": self.live}[kind]  # fmt: skip

    def meet(self, key: tuple[object, ...], rank: int, value: Any) -> None:
        """Contribute a value to a collective."""
        with self.lock:
            self.met.setdefault(key, {})[rank] = value

    def made_up(self, comm: str, nbytes: int) -> Sequence[bytes | None] | None:
        """Generate what phantoms contribute to a gather."""
        begun = time.thread_time()
        found = self.answers[comm].popleft()() if self.answers[comm] else self.phantoms(comm, nbytes)
        self.made_up_s += time.thread_time() - begun
        return found

    def outcome(self, key: tuple[object, ...], due: int, work: Callable[[dict[int, Any]], Any]) -> Any:
        """Give the result of a collective, which is computed once. Gives None while live ranks are missing."""
        with self.lock:
            if len(self.met[key]) < due:
                return None
            if key not in self.results:
                self.results[key] = work(self.met[key])
            return self.results[key]


class Done:
    """A request that is complete."""

    def Test(self) -> bool:
        """Whether it is complete."""
        return True


class Later:
    """A request of a collective. It is complete once all live ranks have called the collective."""

    def __init__(self, finish: Callable[[], bool]):
        self._finish, self._through = finish, False

    def Test(self) -> bool:
        """Whether it is complete."""
        self._through = self._through or self._finish()
        return self._through


class Receive:
    """A request of a receive. Messages of one sender and tag match receives in the order of posting."""

    def __init__(self, fabric: Fabric, key: tuple[object, ...], into: np.ndarray):
        self._fabric, self._key, self._into, self._through = fabric, key, into, False
        with fabric.lock:
            fabric.posted[key].append(self)

    def Test(self) -> bool:
        """Whether it is complete."""
        with self._fabric.lock:
            mail, posted = self._fabric.mail[self._key], self._fabric.posted[self._key]
            while mail and posted:
                posted.popleft().take(mail.popleft())
        return self._through

    def take(self, message: bytes) -> None:
        """Copy a message into the buffer."""
        raw = raw_bytes(self._into)
        raw[: len(message)] = np.frombuffer(message, dtype=np.uint8)
        self._through = True


def raw_bytes(message: Any) -> np.ndarray:
    """Give the bytes of an array, or of a pair of array and type."""
    array = message[0] if isinstance(message, list) else message
    raw: np.ndarray = array.reshape(-1).view(np.uint8)
    return raw
