"""Where live ranks of a simulated world meet: collectives with what each rank brings, messages, and requests for both.

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
"""What each rank brings to a gather, from the name of the communicator and the least bytes that a live rank wants to
bring. None, of all ranks or of one: a live rank brings what it has, a phantom what the live one with the least has.
"""


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a live rank that sends something.

    Attributes:
        comm: name of the communicator.
        what: name of the function; "Isend" and "Rput" are messages, all others are collective.
        nbytes: that this rank brings.
        received: bytes that it gets, of a gather or broadcast.
    """

    rank: int
    comm: str
    what: str
    nbytes: int
    received: int = 0


@dataclasses.dataclass(frozen=True)
class Made:
    """A communicator or a window that a live rank has and has not freed.

    Attributes:
        what: "communicator" or "window".
        size: ranks of it.
    """

    rank: int
    what: str
    size: int


class Fabric:
    """What the live ranks of one world have in common.

    Args:
        size: ranks of the world.
        per_node: ranks on each node.
        live: the ranks that run.
        splits: what the world is split into, in the order of the calls: "node", "leaders", "all" or "group", which is
            the live ranks.
        phantoms: what phantoms bring to a gather.

    Attributes:
        answers: what they bring to the next gathers of a communicator, before ``phantoms`` is asked.
        made_up_s: seconds of processor time that making that up took: no rank of a real job spends them.
        asked: of each live rank what it asked the directory for, and how often.
        sizes: of files that phantoms would have written.
        olds: the ranks of the checkpoint that is written, see `phantoms.Olds`.
        alone_s: seconds of processor time of what the first rank did alone, while a drain was committed.
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
        """Name the ranks of a communicator, in its order."""
        node = rank - rank % self.per_node
        return {"node": range(node, node + self.per_node), "leaders": range(0, self.size, self.per_node),
                "all": range(self.size), "group": self.live}[kind]  # fmt: skip

    def meet(self, key: tuple[object, ...], rank: int, value: Any) -> None:
        """Bring something to a collective."""
        with self.lock:
            self.met.setdefault(key, {})[rank] = value

    def made_up(self, comm: str, nbytes: int) -> Sequence[bytes | None] | None:
        """What phantoms bring to a gather."""
        begun = time.thread_time()
        found = self.answers[comm].popleft()() if self.answers[comm] else self.phantoms(comm, nbytes)
        self.made_up_s += time.thread_time() - begun
        return found

    def outcome(self, key: tuple[object, ...], due: int, work: Callable[[dict[int, Any]], Any]) -> Any:
        """Give the result of a collective, worked out once; None while live ranks are missing."""
        with self.lock:
            if len(self.met[key]) < due:
                return None
            if key not in self.results:
                self.results[key] = work(self.met[key])
            return self.results[key]


class Done:
    """A request that is through."""

    def Test(self) -> bool:
        """Whether it is."""
        return True


class Later:
    """A request of a collective: through once all live ranks have come."""

    def __init__(self, finish: Callable[[], bool]):
        self._finish, self._through = finish, False

    def Test(self) -> bool:
        """Whether it is through."""
        self._through = self._through or self._finish()
        return self._through


class Receive:
    """A request of a receive; messages of one sender and tag go to receives in the order in which these were posted."""

    def __init__(self, fabric: Fabric, key: tuple[object, ...], into: np.ndarray):
        self._fabric, self._key, self._into, self._through = fabric, key, into, False
        with fabric.lock:
            fabric.posted[key].append(self)

    def Test(self) -> bool:
        """Whether it is through."""
        with self._fabric.lock:
            mail, posted = self._fabric.mail[self._key], self._fabric.posted[self._key]
            while mail and posted:
                posted.popleft().take(mail.popleft())
        return self._through

    def take(self, message: bytes) -> None:
        """Put a message where it belongs."""
        raw = raw_bytes(self._into)
        raw[: len(message)] = np.frombuffer(message, dtype=np.uint8)
        self._through = True


def raw_bytes(message: Any) -> np.ndarray:
    """The bytes of an array, or of the pair of one and its type."""
    array = message[0] if isinstance(message, list) else message
    raw: np.ndarray = array.reshape(-1).view(np.uint8)
    return raw
