"""What simulated ranks save: content that depends on rank, step and launch, so that each mixture is seen."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

_BLOCK_NBYTES = 8192
_COMMON = 99  # stands for the rank, where all ranks have the same
_LAZY_NBYTES = 70_000  # smaller tensors are never copied later
_LIGHT_SIZE = 3000
_NOT_COMMON = ("weights", "frozen", "zeros", "noise", "values", "parameter")
NO_LAUNCH = 77  # of states that are there before anything is restored


def noise(rank: int, step: int, launch: int, nbytes: int) -> np.ndarray:
    return np.random.default_rng([rank + 1, step + 1, launch + 1]).integers(0, 256, nbytes, dtype=np.uint8)


class States:
    """The states of one history.

    Args:
        nbytes: of the weights of rank 0; others have a little more.
        special: what the history is about: see `faults.Setting`.
        frozen: whether there are weights that no step changes, and zeros.
    """

    def __init__(self, nbytes: int, special: frozenset[str], frozen: bool):
        self._nbytes, self._special, self._frozen = nbytes, special, frozen and "values" not in special

    def is_suspect(self, step: int) -> bool:
        return "values" in self._special and step % 4 == 3

    def at(self, rank: int, step: int, launch: int) -> dict[str, Any]:
        nbytes = self._nbytes * (3 if "grow" in self._special and step >= 4 else 1)
        nbytes += 0 if "kept" in self._special else 100 * rank  # a spare does not know its rank
        state: dict[str, Any] = {"weights": noise(rank, step, launch, nbytes), "step": step, "launch": launch}
        if self._frozen:
            state["frozen"] = np.concatenate([noise(rank, 0, 0, 9000), np.zeros(9000, np.uint8)])
        for number in range(8 if "zeros" in self._special else 0):
            state[f"zeros{number}"] = np.zeros(_BLOCK_NBYTES, np.uint8)
            state[f"noise{number}"] = noise(rank + 100 * number, step, launch, _BLOCK_NBYTES)
        if self._special & {"common", "elastic"}:
            state["common"] = noise(_COMMON, step, launch, 6000)
        if "values" in self._special:
            state["values"] = noise(rank, step, launch, 1500).astype(np.float32) + 1
            if self.is_suspect(step) and rank == 1:
                state["values"][7] = np.nan
        if self._special & {"lazy", "light"}:
            state["parameter"] = torch.nn.Parameter(torch.from_numpy(self._parameter(rank, step, launch)))
        return state

    def _parameter(self, rank: int, step: int, launch: int) -> np.ndarray:
        size = _LIGHT_SIZE if "light" in self._special else _LAZY_NBYTES
        return noise(rank, step, launch, size).astype(np.float32)

    def differences(self, state: dict[str, Any], rank: int, step: int, launch: int, only_common: bool) -> list[str]:
        """The names of what is not, bit for bit, what it must be.

        Args:
            only_common: only what all ranks have alike is compared, as the rank is a new one.
        """
        wanted = self.at(rank, step, launch)
        names = [name for name in wanted if not (only_common and name.rstrip("0123456789") in _NOT_COMMON)]
        return [name for name in names if raw_of(state.get(name)) != raw_of(wanted[name])]


def raw_of(value: Any) -> bytes:
    array = value.detach().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
    return f"{array.dtype}{array.shape}".encode() + array.tobytes()


class Setter(torch.optim.Optimizer):
    """An optimizer whose step gives its parameter a new content."""

    def __init__(self, parameter: torch.nn.Parameter):
        super().__init__([parameter], {})
        self._parameter = parameter

    @torch.no_grad()
    def step(self, content: torch.Tensor) -> None:  # type: ignore[override]
        self._parameter.copy_(content)
