"""How ranks agree on each epoch of their couriers, in the store that all of them reach.

Epoch N has three kinds of keys. ``launch/N/node/RANK`` is written by a rank that wants this epoch: its node, what can
read its memory there (`cross_memory`), and what it has seen freed. ``launch/N/all`` is written by rank 0 as soon as all
ranks want the epoch: ``[name, nodes, reads, freed]``. ``launch/N/ended`` is written by a rank whose courier has ended.
In addition, the keys below ``launch/N/cores/HOST/`` have the cores of each rank of a host, for `courier_cores`. When
MPI is initialized on all ranks, only ``all`` and ``ended`` stay.

If a rank has left the job permanently, a rank that waits for the end of an epoch or for the next one is told there that
another rank will never come (`Departure`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..errors import DeadlineExceeded
from ..placement.node import name_of_host
from . import cross_memory
from .pmi_server import new_epoch_name
from .process_mapping import Block, blocks, nodes_of
from .store_client import StoreClient, StoreLost, connect, left_s

_TOLD_S = 10.0  # limit for the store of a busy host to take it: a rank that is not told waits forever


class RankDeparted(ConnectionError):
    """A rank has left the job, so there is no next epoch of its couriers."""

    def __init__(self, departure: Departure):
        super().__init__(str(departure))
        self.departure = departure


@dataclasses.dataclass(frozen=True)
class Departure:
    """A rank that has left, and why."""

    rank: int
    why: str  # a clause to follow a colon
    ends_job: bool  # whether the other ranks must end, too, as after MPI_Abort

    def __str__(self) -> str:
        return f"rank {self.rank} has left the job: {self.why}"

    def puts(self, number: int) -> list[tuple[str, str]]:
        """Keys and values that tell all ranks that wait for the end of epoch ``number`` or for the next epoch."""
        told = json.dumps({"departed": dataclasses.asdict(self)})
        return [
            (below(number + 1) + "all", told),
            (departed_key(number, self.rank), ""),
            (below(number) + "ended", told),
        ]


def below(number: int) -> str:
    """The prefix of the keys of an epoch."""
    return f"launch/{number}/"


def departed_key(number: int, rank: int) -> str:
    """The key that has an empty value once a rank of epoch ``number`` has told all that it leaves."""
    return f"{below(number + 1)}node/{rank}"


def needed_until_up(number: int) -> tuple[str, str]:
    """Prefixes of the keys of an epoch that are no longer needed when MPI is initialized everywhere."""
    return below(number) + "node/", below(number) + "cores/"


def number_of(epoch: str) -> int:
    """The number of an epoch, from its name (`pmi_server.new_epoch_name`)."""
    return int(epoch.split("-")[1])


def check_departure(told: str) -> None:
    """Raise RankDeparted if a value of the store reports a departure."""
    value = json.loads(told)
    if isinstance(value, dict) and "departed" in value:
        raise RankDeparted(Departure(**value["departed"]))


class Farewell:
    """Tells all ranks about a departure, over a connection of its own and without waiting."""

    def __init__(self, store: StoreClient, departure: Departure, number: int):
        self.store, self._end = store, time.monotonic() + _TOLD_S
        puts = departure.puts(number)
        self._untold = len(puts)
        for put in puts:
            store.send(self._told, "put", *put)

    def _told(self, result: object, error: OSError | None) -> None:
        self._untold -= 1

    @property
    def left_s(self) -> float:
        """How long it may still take, in seconds; 0 if everything is told, or cannot be."""
        return max(0.0, self._end - time.monotonic()) if self._untold else 0.0


_PASSED = "null"  # what rank 0 says of an epoch whose `all` was lost with the store
_FOREVER_S = 1e6  # nearly as long as poll can wait
_ASK_S = 5.0  # limit for one more answer after a deadline, to find the reason


class Epoch(NamedTuple):
    """One world of MPI."""

    name: str
    nodes: tuple[int, ...]  # of each rank
    reads: bool = True  # whether ranks of a node can read each other's memory
    freed: frozenset[str] = frozenset()  # what ranks had seen freed when it began. It needs no courier any more


class EpochAgreement:
    """How one rank agrees with the others. Close it; it may be closed twice.

    One thread uses it, but any thread may call `put` and `share`. `agree` may replace the connection ``store``.

    Args:
        node: name of the node with which this rank shares memory.
        seat: its cores, as text of `courier_cores.Seat`; "" if the other ranks need not know.
        end: when it must be connected, by time.monotonic.
        check: see `store_client.connect`.
    """

    def __init__(self, rank: int, size: int, node: str, seat: str, address: tuple[str, int], token: str, end: float,
                 check: Callable[[], None]):  # fmt: skip
        self.address, self.token, self._check = address, token, check
        self.store = connect(address, token, end, check)
        self._rank, self._size, self._node, self._seat = rank, size, node, seat
        self._shared = itertools.count()

    def close(self) -> None:
        """Close the connection."""
        self.store.close()

    def put(self, puts: Sequence[tuple[str, str]], timeout_s: float) -> None:
        """Set the values of keys, over a separate connection. Not collective; any thread.

        Raises:
            StoreLost, DeadlineExceeded: the store did not take them.
        """
        with self._another() as store:
            for key, value in puts:
                store.put(key, value, timeout_s)

    def share(self, text: str | None, timeout_s: float) -> str:
        """Give rank 0's text to all ranks. Collective; one thread may do this in parallel to `agree`.

        Raises:
            StoreLost, DeadlineExceeded: rank 0 has ended, or did not come.
        """
        key = f"shared/{next(self._shared)}"
        with self._another() as store:
            if self._rank == 0:
                store.put(key, text or "", timeout_s)
            return store.get(key, timeout_s)

    def _another(self) -> contextlib.closing[StoreClient]:
        """A connection for another thread than that of `store`."""
        return contextlib.closing(StoreClient(self.address, self.token))

    def agree(self, number: int, end: float, timeout_s: float, freed: Sequence[str] = ()) -> Epoch | None:
        """Ask for an epoch, and wait until all ranks have asked for it. Collective.

        None: rank 0 has passed on to the next one, because the store was lost before all had heard of this one.

        Args:
            end: until when to wait, by time.monotonic.
            timeout_s: how long that was when the caller began, for the error.
            freed: what this rank has seen freed.

        Raises:
            DeadlineExceeded: some ranks, those in ``ranks``, have not come.
            RankDeparted: a rank has left the job.
        """
        prefix = below(number)
        try:
            while True:
                try:
                    if self._seat:
                        self.store.put(f"{prefix}cores/{name_of_host()}/{self._rank}", self._seat, left_s(end))
                    mine = json.dumps([self._node, cross_memory.reach(), list(freed)])
                    self.store.put(f"{prefix}node/{self._rank}", mine, left_s(end))
                    if self._rank == 0:
                        self._gather(number, end)
                    told = self.store.get(f"{prefix}all", left_s(end))
                    break
                except StoreLost:
                    self.store.close()
                    self.store = connect(self.address, self.token, end, self._check)
        except DeadlineExceeded as exceeded:
            missing = self.missing(f"{prefix}node/")
            late = f"{len(missing)} of {self._size} have not come" if missing else "all have come, but too late"
            raise DeadlineExceeded(
                f"waited {timeout_s:g} s for all ranks to start epoch {number} of their couriers: "
                + ("the host of rank 0, at which they meet, does not answer" if missing is None else late),
                rank=self._rank,
                ranks=[0] if missing is None else missing,
            ) from exceeded
        check_departure(told)
        if told == _PASSED:
            return None
        name, described, reads, known = json.loads(told)
        nodes = nodes_of([Block(*block) for block in described], self._size)
        return Epoch(name, tuple(nodes), reads, frozenset(known))

    def _gather(self, number: int, end: float) -> None:
        """Wait for all ranks, and publish the epoch. Called on rank 0."""
        prefix, before = below(number), below(number - 1)
        last = self.store.look(f"{before}all", left_s(end)) if number > 1 else None
        if number > 1 and last is None:  # the store is a new one
            self.store.put(f"{before}all", _PASSED, left_s(end))
        self.store.get(f"{prefix}node/{self._size - 1}", left_s(end))  # by then most have come
        there = self.store.below(f"{prefix}node/", left_s(end))
        told = [there.get(str(rank)) or self.store.get(f"{prefix}node/{rank}", left_s(end))
                for rank in range(self._size)]  # fmt: skip
        if "" in told:  # a rank has left the job, and has told all
            return
        known: list[tuple[str, str, list[str]]] = [json.loads(one) for one in told]
        numbers = {name: number for number, name in enumerate(dict.fromkeys(name for name, _, _ in known))}
        nodes = [numbers[name] for name, _, _ in known]
        freed = sorted({one for _, _, those in known for one in those})
        # All ranks have come here, so none needs the keys of the last epoch.
        if number > 1:
            if (ended := json.loads(last or _PASSED)) is not None:
                self.store.delete(f"{ended[0]}/", left_s(end))
            self.store.delete(before, left_s(end))
        reads = cross_memory.is_whole(nodes, [reach for _, reach, _ in known])
        self.store.put(f"{prefix}all", json.dumps([new_epoch_name(number), blocks(nodes), reads, freed]), left_s(end))

    def seats(self, number: int, end: float) -> dict[str, str]:
        """The cores of each rank of this host: by rank, as text. Not collective, but after `agree`.

        Raises:
            DeadlineExceeded, StoreLost: the store does not answer.
        """
        return self.store.below(f"{below(number)}cores/{name_of_host()}/", left_s(end))

    def missing(self, prefix: str) -> list[int] | None:
        """The ranks that have put nothing below a prefix; None if the store does not answer."""
        try:
            there = self.store.below(prefix, _ASK_S)
        except (OSError, DeadlineExceeded):
            return None
        return [rank for rank in range(self._size) if str(rank) not in there]

    def wait_for_end(self, number: int) -> None:
        """Wait until a rank has announced the end of an epoch, however long that takes.

        Raises RankDeparted, or StoreLost: nobody can announce anything.
        """
        while True:
            try:
                told = self.store.get(below(number) + "ended", _FOREVER_S)
            except DeadlineExceeded:
                continue
            check_departure(told)
            return
