"""Random texts to train on, always the same."""

from __future__ import annotations

import torch


def text_of(number: int, length: int, words: int) -> torch.Tensor:
    """One text, ``(length,)`` int64: numbers below ``words``."""
    return torch.randint(0, words, (length,), generator=torch.Generator().manual_seed(int(number)))


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """So many of them; a subclass makes each."""

    def __init__(self, count: int):
        self._count = count

    def __len__(self) -> int:
        return self._count
