"""torchsnapshot's async_take, as its documentation advises where training is kept waiting; restored in place."""

from __future__ import annotations

import shutil
from pathlib import Path

from interface import Peer, Place, State
from torchsnapshot import Snapshot, StateDict


class Library(Peer):
    """A snapshot is a directory that must not exist; the one before is deleted by the user."""

    def __init__(self, place: Place, state: State):
        self._place = place
        self._app = {"state": StateDict(**state)}  # of each rank its own: nothing is replicated
        self._paths: list[Path] = []

    def save(self, step: int, state: State) -> None:
        self._paths.append(self._place.memory / f"snapshot-{step}")
        self._pending = Snapshot.async_take(str(self._paths[-1]), self._app)

    def wait(self) -> None:
        self._pending.wait()

    def load(self, state: State) -> None:
        Snapshot(str(self._paths[-1])).restore(self._app)

    def tidy(self) -> None:
        self._place.comm.Barrier()
        while len(self._paths) > 1:
            path = self._paths.pop(0)
            if self._place.rank == 0:
                shutil.rmtree(path)
        self._place.comm.Barrier()
