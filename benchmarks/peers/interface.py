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
    """The ranks and the directory that a library uses.

    Attributes:
        comm: mpi4py communicator of all ranks. torch.distributed uses gloo with the same ranks.
        memory: directory in /dev/shm that all ranks share. It is removed after the run.
    """

    comm: Any
    memory: Path

    @property
    def rank(self) -> int:
        return int(self.comm.rank)


class Directories:
    """A directory in memory for each checkpoint, for libraries whose user must delete old checkpoints."""

    def __init__(self, place: Place, name: str):
        self._place, self._name = place, name
        self._paths: list[Path] = []

    def add(self, step: int) -> Path:
        """Return the path for the next checkpoint. The directory does not exist yet."""
        self._paths.append(self._place.memory / f"{self._name}-{step}")
        return self._paths[-1]

    @property
    def newest(self) -> Path:
        return self._paths[-1]

    def tidy(self) -> None:
        """Delete all directories except the newest. Collective."""
        self._place.comm.Barrier()
        while len(self._paths) > 1:
            path = self._paths.pop(0)
            if self._place.rank == 0:
                shutil.rmtree(path)
        self._place.comm.Barrier()


class Peer(ABC):
    """One library, used in the fast way that its own documentation describes.

    Args:
        place: where it works.
        state: live tensors like those that will be saved. A library may allocate memory for them in advance.
    """

    @abstractmethod
    def __init__(self, place: Place, state: State): ...

    @abstractmethod
    def save(self, step: int, state: State) -> None:
        """Begin a checkpoint. Training waits until this returns, and may then change the state."""

    def wait(self) -> None:  # noqa: B027  nothing to do for most
        """Return when the library calls the checkpoint complete on this rank. Synchronous libraries have it already."""

    @abstractmethod
    def load(self, state: State) -> State | None:
        """Load the newest checkpoint.

        Returns:
            Its tensors, or None if they were loaded into ``state``.
        """

    def tidy(self) -> None:  # noqa: B027  nothing to do for most
        """Delete checkpoints older than the newest, if the library does not do it by itself. This is not timed."""

    def close(self) -> None:  # noqa: B027  nothing to do for most
        """End processes and threads."""
