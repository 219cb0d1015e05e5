"""torchsnapshot's async_take, as its documentation advises if saving stops training. It restores in place."""

from __future__ import annotations

from interface import Directories, Peer, Place, State
from torchsnapshot import Snapshot, StateDict


class Library(Peer):
    """Writes each snapshot to a new directory. The user deletes the previous one."""

    def __init__(self, place: Place, state: State):
        self._app = {"state": StateDict(**state)}  # each rank has its own state: nothing is replicated
        self._directories = Directories(place, "snapshot")

    def save(self, step: int, state: State) -> None:
        self._pending = Snapshot.async_take(str(self._directories.add(step)), self._app)

    def wait(self) -> None:
        self._pending.wait()

    def load(self, state: State) -> None:
        Snapshot(str(self._directories.newest)).restore(self._app)

    def tidy(self) -> None:
        self._directories.tidy()
