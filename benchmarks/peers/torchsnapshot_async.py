"""torchsnapshot's async_take, as its documentation advises if saving stops training; restored in place."""

from __future__ import annotations

from interface import Directories, Peer, Place, State
from torchsnapshot import Snapshot, StateDict


class Library(Peer):
    """A snapshot is a directory that must not exist; the one before is deleted by the user."""

    def __init__(self, place: Place, state: State):
        self._app = {"state": StateDict(**state)}  # of each rank its own: nothing is replicated
        self._directories = Directories(place, "snapshot")

    def save(self, step: int, state: State) -> None:
        self._pending = Snapshot.async_take(str(self._directories.add(step)), self._app)

    def wait(self) -> None:
        self._pending.wait()

    def load(self, state: State) -> None:
        Snapshot(str(self._directories.newest)).restore(self._app)

    def tidy(self) -> None:
        self._directories.tidy()
