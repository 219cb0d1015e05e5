"""A rank that has left its job for good, and how the other ranks hear of it.

Everything that the ranks agree on of epoch N of their couriers lies in the store below ``launch/N/`` (`launch`). Who
waits for the end of an epoch, or for the next one, is told there that a rank will never come.
"""

from __future__ import annotations

import dataclasses
import json
import time

from .store_client import StoreClient

_TOLD_S = 10.0  # for the store to take it, on a host that may be busy: who is not told waits for ever


class RankDeparted(ConnectionError):
    """A rank has left the job, so that there is no next epoch of its couriers."""

    def __init__(self, departure: Departure):
        super().__init__(str(departure))
        self.departure = departure


@dataclasses.dataclass(frozen=True)
class Departure:
    """That a rank has left, and why.

    Attributes:
        rank: that left.
        why: as a clause, to be read after a colon.
        ends_job: whether the other ranks are to end, too, as MPI_Abort would end them.
    """

    rank: int
    why: str
    ends_job: bool

    def __str__(self) -> str:
        return f"rank {self.rank} has left the job: {self.why}"

    def puts(self, number: int) -> list[tuple[str, str]]:
        """What says so to all that wait for epoch ``number`` to end, or for the next one: keys and values."""
        told = json.dumps({"departed": dataclasses.asdict(self)})
        following = below(number + 1)
        return [(following + "all", told), (f"{following}node/{self.rank}", ""), (below(number) + "ended", told)]


def below(number: int) -> str:
    """Where in the store an epoch has its keys."""
    return f"launch/{number}/"


def needed_until_up(number: int) -> tuple[str, str]:
    """What of an epoch nobody needs any more when MPI is initialised everywhere: how such keys begin."""
    return below(number) + "node/", below(number) + "cores/"


def number_of(epoch: str) -> int:
    """The number of an epoch, from its name (`pmi_server.new_epoch_name`)."""
    return int(epoch.split("-")[1])


def check_departure(told: str) -> None:
    """Raise RankDeparted where a value of the store tells of a departure."""
    value = json.loads(told)
    if isinstance(value, dict) and "departed" in value:
        raise RankDeparted(Departure(**value["departed"]))


class Farewell:
    """Tells all ranks of a departure, without waiting. Not collective.

    Args:
        store: a connection of its own.
        departure: to be told.
        number: of the newest epoch.
    """

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
        """How long it may still take, seconds; 0 where all is told, or cannot be."""
        return max(0.0, self._end - time.monotonic()) if self._untold else 0.0
