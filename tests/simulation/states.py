"""What simulated ranks save: content that depends on rank, step and launch, so that each mixture is seen."""

from __future__ import annotations

from typing import Any

import numpy as np

_BLOCK_NBYTES = 8192
_COMMON = 99  # stands for the rank, where all ranks have the same


def noise(rank: int, step: int, launch: int, nbytes: int) -> np.ndarray:
    return np.random.default_rng([rank + 1, step + 1, launch + 1]).integers(0, 256, nbytes, dtype=np.uint8)


class States:
    """The states of one history.

    Args:
        nbytes: of the weights of rank 0; others have a little more.
        grows_at: the step from which weights are three times as large; 0: never.
        frozen: whether there are weights that no step changes, and zeros.
        common: whether there are weights that all ranks have alike.
        zeros: pairs of a block of zeros and a block of noise.
    """

    def __init__(self, nbytes: int, grows_at: int, frozen: bool, common: bool, zeros: int):
        self._nbytes, self._grows_at, self._frozen, self._common, self._zeros = nbytes, grows_at, frozen, common, zeros

    def at(self, rank: int, step: int, launch: int) -> dict[str, Any]:
        """The state of a rank after a step."""
        nbytes = self._nbytes * (3 if self._grows_at and step >= self._grows_at else 1) + 100 * rank
        state: dict[str, Any] = {"weights": noise(rank, step, launch, nbytes), "step": step, "launch": launch}
        if self._frozen:
            state["frozen"] = np.concatenate([noise(rank, 0, 0, 9000), np.zeros(9000, np.uint8)])
        for number in range(self._zeros):
            state[f"zeros{number}"] = np.zeros(_BLOCK_NBYTES, np.uint8)
            state[f"noise{number}"] = noise(rank + 100 * number, step, launch, _BLOCK_NBYTES)
        if self._common:
            state["common"] = noise(_COMMON, step, launch, 6000)
        return state

    def differences(self, state: dict[str, Any], rank: int, step: int, launch: int, only_common: bool = False) -> list[str]:
        """The names of what is not, bit for bit, what it must be.

        Args:
            only_common: only what all ranks have alike is compared: the rank is new.
        """
        wanted = self.at(rank, step, launch)
        names = [name for name in wanted if name in ("common", "step", "launch")] if only_common else list(wanted)
        return [name for name in names if not np.array_equal(np.asarray(state.get(name)), np.asarray(wanted[name]))]
