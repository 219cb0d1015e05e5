"""mlflash without redundancy, and with a copy of each slot on the other node. It checks every byte."""

from __future__ import annotations

from interface import Peer, Place, State

from mlflash import Checkpointer

TIMEOUT_S = 60.0


class Alone(Peer):
    """Makes the slots in advance, as the README of mlflash advises."""

    redundancy = "none"

    def __init__(self, place: Place, state: State):
        self._ckpt = Checkpointer(job=f"ours-{self.redundancy}", comm=place.comm, strict=True,
                                  redundancy=self.redundancy, timeout_s=TIMEOUT_S)  # fmt: skip
        self._ckpt.prepare(state)

    def save(self, step: int, state: State) -> None:
        self._snapshot = self._ckpt.save(step, state)

    def wait(self) -> None:
        self._snapshot.wait()

    def load(self, state: State) -> None:
        assert self._ckpt.restore(state) is not None

    def close(self) -> None:
        self._ckpt.close()


class Copied(Alone):
    """The same as without redundancy, with a copy in addition, which both ends check."""

    redundancy = "copy"
