"""The interface of every library for the ranks: save, wait until the checkpoint is whole, load."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Place:
    """Where a library works.

    Attributes:
        comm: mpi4py communicator of all ranks; torch.distributed is set up over gloo with the same ones.
        memory: directory in /dev/shm that all ranks share; it goes with the run.
    """

    comm: Any
    memory: Path

    @property
    def rank(self) -> int:
        return int(self.comm.rank)


class Directories:
    """A directory in memory for each checkpoint, for libraries that leave it to their user to delete the older ones."""

    def __init__(self, place: Place, name: str):
        self._place, self._name = place, name
        self._paths: list[Path] = []

    def add(self, step: int) -> Path:
        """Name that of the next checkpoint; nobody has made it yet."""
        self._paths.append(self._place.memory / f"{self._name}-{step}")
        return self._paths[-1]

    @property
    def newest(self) -> Path:
        return self._paths[-1]

    def tidy(self) -> None:
        """Delete all but the newest. Collective."""
        self._place.comm.Barrier()
        while len(self._paths) > 1:
            path = self._paths.pop(0)
            if self._place.rank == 0:
                shutil.rmtree(path)
        self._place.comm.Barrier()


class Peer(ABC):
    """One library, in the way that its own documentation calls the fast one.

    Args:
        place: where it works.
        state: live tensors like those that will be saved; allocating for them in advance is allowed.
    """

    @abstractmethod
    def __init__(self, place: Place, state: State): ...

    @abstractmethod
    def save(self, step: int, state: State) -> None:
        """Begin a checkpoint; training is kept waiting until this returns, and may then change the state."""

    def wait(self) -> None:  # noqa: B027  nothing to do for most
        """Return once the checkpoint is whole on this rank, in the words of the library; sync ones have it by now."""

    @abstractmethod
    def load(self, state: State) -> State | None:
        """Load the newest checkpoint.

        Returns:
            Its tensors, or None where they were put into ``state``.
        """

    def tidy(self) -> None:  # noqa: B027  nothing to do for most
        """Delete what is older than the newest checkpoint, for those that leave that to their user; not timed."""

    def close(self) -> None:  # noqa: B027  nothing to do for most
        """End processes and threads."""
