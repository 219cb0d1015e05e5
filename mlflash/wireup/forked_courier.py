"""A courier as its zygote sees it, until the courier's end."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator

from . import mpich_segments
from .address_relay import Watch
from .frames import Frames
from .pmi_server import PmiServer
from .store_client import StoreClient

NOT_UP = "MPI was not up"
"""How the text begins why a courier was killed in MPI_Init."""
ENDS_S = 6.0
"""Limit for a courier to end after its trainer: it gives up what is left after 4 s, and a new run waits 8 s for it."""


@dataclasses.dataclass
class ForkedCourier:
    """A courier that still runs, or was not reaped yet.

    Attributes:
        pid: its process number.
        pidfd: readable when it has ended.
        epoch: the name of its world.
        rank: in that world.
        mpi: the server of PMI over which it starts MPI, and that server's connection; None without MPI.
        up_s: how long it may take to initialize MPI, in seconds.
        reports_fd: a pipe from it.
        reports: what came over the pipe.
        segments: shared memory that it may leave behind.
        reports_more: whether the pipe is open.
        is_up: whether its MPI is initialized.
        up_at: since when, by time.monotonic.
        why: why the zygote killed it.
        forked_at: when, by time.monotonic.
    """

    pid: int
    pidfd: int
    epoch: str
    rank: int
    mpi: tuple[PmiServer, StoreClient] | None
    up_s: float
    reports_fd: int
    reports: Frames
    segments: set[str]
    reports_more: bool = True
    is_up: bool = False
    up_at: float = 0.0
    why: str | None = None
    forked_at: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def error(self) -> str | None:
        """Why it cannot go on, according to its server of PMI."""
        return self.mpi[0].error if self.mpi is not None else None

    def watches(self) -> Iterator[Watch]:
        """What to wait for while it starts MPI, and what to call then."""
        if self.mpi is not None:
            pmi, store = self.mpi
            yield from pmi.watches()
            yield store.fileno(), store.events, store.step

    def note_segments(self) -> None:
        """Find out which shared memory of MPI it maps, while it lives."""
        self.segments |= mpich_segments.mapped_by(self.pid)

    def close(self) -> None:
        """Close what the zygote has open for it."""
        for one in self.mpi or ():
            one.close()
        os.close(self.pidfd)
        os.close(self.reports_fd)
