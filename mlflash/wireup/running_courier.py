"""A courier as its trainer has it, and how it ends."""

from __future__ import annotations

import dataclasses
import os
import select
import socket

from .pmi_server import ABORTS
from .zygote_client import CourierEnd, ZygoteClient

_REAPED_S = 5.0  # for a courier to end that is ending, and for its zygote to say how it has


class CourierEnded(ConnectionError):
    """A courier has ended where it was needed; the text says how."""


class StartFailed(CourierEnded):
    """The first courier of a trainer has ended by itself before its MPI was up: the next one would, too."""


@dataclasses.dataclass(frozen=True)
class RunningCourier:
    """A courier, as its trainer has it.

    Attributes:
        number: of its epoch, from 1.
        epoch: the name of its world of MPI, the same on all ranks.
        nodes: the node of each rank, numbered as they first appear `(ranks)`.
        trainer: the trainer's end of the socket between the two.
        pid: its process number.
        pidfd: readable when it has ended.
        cores: that it was told to run on; None: those of this process.
    """

    number: int
    epoch: str
    nodes: tuple[int, ...]
    trainer: socket.socket
    pid: int
    pidfd: int
    cores: frozenset[int] | None = None

    def close(self) -> None:
        """Close the socket and the pidfd, once: `Couriers` does so before the next epoch. Not collective."""
        self.trainer.close()
        os.close(self.pidfd)


def ended(end: CourierEnd) -> CourierEnded:
    """The error that says how a courier has ended."""
    how = f"exited with {end.status}" if end.signal is None else f"was killed by signal {end.signal}"
    why = f", since {end.why}" if end.why else ""
    return CourierEnded(f"courier {end.pid} of rank {end.rank} {how}{why}; what it printed may say more")


def check_start(running: RunningCourier, zygote: ZygoteClient) -> None:
    """See whether a courier that is ending, as it has closed its socket, has come as far as MPI. Not collective.

    Only of the first one of a trainer: to later ones something may have happened on the way.

    Raises:
        StartFailed: it has ended by itself before.
        ZygoteLost, DeadlineExceeded: the zygote does not say so.
    """
    if running.number > 1 or zygote.is_up(running.pid):
        return
    poll = select.poll()
    poll.register(running.pidfd, select.POLLIN)
    if poll.poll(_REAPED_S * 1000):
        end = zygote.wait(running.pid, _REAPED_S)
        # Its zygote kills one whose MPI has said that it aborts, and which may be about to exit by itself.
        by_itself = end.signal is None or (end.why or "").startswith(ABORTS)
        if not zygote.is_up(running.pid) and by_itself:
            raise StartFailed(str(ended(end)))
