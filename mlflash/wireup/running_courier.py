"""A courier as its trainer sees it, and how it ends."""

from __future__ import annotations

import dataclasses
import os
import select
import socket

from .forked_courier import NOT_UP
from .pmi_server import ABORTS
from .zygote_client import CourierEnd, ZygoteClient

_REAPED_S = 5.0  # limit for a courier to end, and for its zygote to report how


class CourierEnded(ConnectionError):
    """A courier has ended while it was needed; the text says how."""


class StartFailed(CourierEnded):
    """The first courier of a trainer has ended by itself before its MPI was up. The next one would do the same."""


@dataclasses.dataclass(frozen=True)
class RunningCourier:
    """A courier, as its trainer sees it.

    Attributes:
        number: of its epoch, from 1.
        epoch: the name of its world of MPI, the same on all ranks.
        nodes: the node of each rank, numbered as they first appear `(ranks)`.
        trainer: the trainer's end of the socket to it.
        pid: its process number.
        pidfd: readable when it has ended.
        cores: the cores that it was told to use; None: those of this process.
    """

    number: int
    epoch: str
    nodes: tuple[int, ...]
    trainer: socket.socket
    pid: int
    pidfd: int
    cores: frozenset[int] | None = None

    def close(self) -> None:
        """Close the socket and the pidfd, only once: `Couriers` does so before the next epoch."""
        self.trainer.close()
        os.close(self.pidfd)


def ended(end: CourierEnd) -> CourierEnded:
    """An error that says how a courier has ended."""
    how = f"exited with {end.status}" if end.signal is None else f"was killed by signal {end.signal}"
    why = f", since {end.why}" if end.why else ""
    return CourierEnded(f"courier {end.pid} of rank {end.rank} {how}{why}; its output may say more")


def check_start(running: RunningCourier, zygote: ZygoteClient) -> None:
    """Check whether a courier that has closed its socket had reached MPI.

    This only checks the first courier of a trainer. Later ones may have ended for other reasons.

    Raises:
        StartFailed: it has ended by itself before MPI was up.
        ZygoteLost, DeadlineExceeded: the zygote does not tell.
    """
    if running.number > 1 or zygote.is_up(running.pid):
        return
    poll = select.poll()
    poll.register(running.pidfd, select.POLLIN)
    if poll.poll(_REAPED_S * 1000):
        end = zygote.wait(running.pid, _REAPED_S)
        # The zygote kills a courier whose MPI has reported an abort, or has not come up. It has ended by itself.
        by_itself = end.signal is None or (end.why or "").startswith((ABORTS, NOT_UP))
        if not zygote.is_up(running.pid) and by_itself:
            raise StartFailed(str(ended(end)))
