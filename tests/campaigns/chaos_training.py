"""A training whose every bit depends on all that came before, on every rank; and the run nothing interrupts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

SHARED = 4096  # numbers that each rank gives to all others in a step
WEIGHTS = 32 * SHARED  # 0.5 MB, the same on all ranks
PRIVATE = 24 * SHARED  # of rank 0; each further rank has as much more
GROWTH = (150, 500, 1200, 2500, 5000, 9000, 14000, 20000)  # the steps that add an array to the state


class Training:
    """State of one rank: weights that all share, a part of its own, arrays that come with time, a random stream.

    Only sums and products of elements, in a fixed order: the result has the same bits wherever it is computed.

    Args:
        rank: which rank this is; its part is larger for higher ones.
        random: ``numpy.random`` itself, or a ``RandomState`` of its own where several ranks live in one process.
    """

    def __init__(self, rank: int, random: Any):
        self.random = random
        self.random.seed(1000 + rank)
        self.step = 0
        self.weights = self.random.standard_normal(WEIGHTS).astype(np.float32)
        self.private = self.random.standard_normal(PRIVATE * (1 + rank)).astype(np.float32)
        self.trace = np.zeros(SHARED, dtype=np.uint32)
        self.grown: list[np.ndarray] = []

    def give(self) -> np.ndarray:
        """What this rank adds to everybody's next step: its data, and what it learned so far."""
        data = self.random.standard_normal(SHARED).astype(np.float32)
        own = self.private[:SHARED] + self.private[-SHARED:]
        for array in self.grown:
            own += array[:SHARED]
        return data + self.weights[-SHARED:] * np.float32(0.01) + own * np.float32(0.0005)

    def take(self, gifts: Sequence[np.ndarray]) -> None:
        """Make a step from what all ranks gave; every number of the state changes."""
        total = gifts[0].copy()
        for gift in gifts[1:]:  # in the order of the ranks: sums round
            total += gift
        total *= np.float32(1 / len(gifts))  # what feeds back must not grow
        self.step += 1
        self.trace *= np.uint32(1664525)  # wraps around: a wrong bit stays wrong, where that of a float may fade
        self.trace += total.view(np.uint32)
        first = self.weights[:SHARED].copy()
        for array in (self.weights, self.private, *self.grown):
            array *= np.float32(0.97)
            rows = array.reshape(-1, SHARED)
            rows += total
            rows[:, 0] += rows[::-1, 1] * np.float32(0.01)
        self.private[-SHARED:] += first * np.float32(0.01)
        if self.step in GROWTH:
            self.grown.append(np.tile(total, 16 + 2 * len(self.grown)))

    def state_dict(self) -> dict[str, Any]:
        arrays = {"weights": self.weights, "private": self.private, "trace": self.trace}
        return {"step": self.step, "grown": self.grown, **arrays}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.grown = state["step"], list(state["grown"])
        self.weights, self.private, self.trace = state["weights"], state["private"], state["trace"]

    def digest(self) -> str:
        """Checksum of every byte of the state, the random stream included."""
        name, keys, position, has_gauss, cached = self.random.get_state(legacy=True)
        made = xxhash.xxh3_128(repr((self.step, name, int(position), int(has_gauss), float(cached).hex())).encode())
        for array in (keys, self.weights, self.private, self.trace, *self.grown):
            made.update(np.ascontiguousarray(array).view(np.uint8).data)
        return made.hexdigest()


class Uninterrupted:
    """The same training with all ranks in this process, and its digests every so many steps: no MPI, no checkpoints."""

    def __init__(self, ranks: int, every: int):
        self._ranks = [Training(rank, np.random.RandomState()) for rank in range(ranks)]
        self._every = every
        self._digests: dict[int, list[str]] = {0: self._now()}

    def digests(self, step: int) -> list[str]:
        """The digest of each rank after a step, which `every` must divide."""
        while self._ranks[0].step < step:
            gifts = [rank.give() for rank in self._ranks]
            for rank in self._ranks:
                rank.take(gifts)
            if self._ranks[0].step % self._every == 0:
                self._digests[self._ranks[0].step] = self._now()
        return self._digests[step]

    def _now(self) -> list[str]:
        return [rank.digest() for rank in self._ranks]
