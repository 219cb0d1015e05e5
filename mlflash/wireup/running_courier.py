"""A courier as its trainer has it, and how it ends."""

from __future__ import annotations

import dataclasses
import os
import socket

from .zygote_client import CourierEnd


class CourierEnded(ConnectionError):
    """A courier has ended where it was needed; the text says how."""


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
