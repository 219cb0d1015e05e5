"""A rank that has left its job permanently, and how the other ranks learn about it.

Everything that the ranks agree on for epoch N of their couriers is in the store below ``launch/N/`` (`launch`). A rank
that waits for the end of an epoch or for the next one is told there that another rank will never come.
"""

from __future__ import annotations

import dataclasses
import json
import time

from .store_client import StoreClient

_TOLD_S = 10.0  # limit for the store of a busy host to take it: a rank that is not told waits forever


class RankDeparted(ConnectionError):
    """A rank has left the job, so there is no next epoch of its couriers."""

    def __init__(self, departure: Departure):
        super().__init__(str(departure))
        self.departure = departure


@dataclasses.dataclass(frozen=True)
class Departure:
    """A rank that has left, and why.

    Attributes:
        rank: that has left.
        why: a clause to follow a colon.
        ends_job: whether the other ranks must end, too, as after MPI_Abort.
    """

    rank: int
    why: str
    ends_job: bool

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
    """Tells all ranks about a departure, without waiting.

    Args:
        store: a connection of its own.
        departure: to be reported.
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
        """How long it may still take, in seconds; 0 if everything is told, or cannot be."""
        return max(0.0, self._end - time.monotonic()) if self._untold else 0.0
