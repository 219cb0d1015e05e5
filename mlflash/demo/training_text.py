"""Text that every machine has, as batches of bytes. The place in it can be saved."""

from __future__ import annotations

from typing import Any

import torch


class Batches:
    """Endless shuffled batches of the help texts of CPython's ``pydoc_data``.

    Each epoch has its own order, made from the seed, and each rank takes every ``size``-th window. Therefore only
    ``epoch`` and ``position`` must be saved.

    Args:
        rank: this rank.
        size: number of ranks.
        batch: windows per batch.
        context: bytes per window.
        seed: seed of the order.
    """

    def __init__(self, rank: int, size: int, batch: int, context: int, seed: int):
        from pydoc_data.topics import topics

        text = "\n".join(topics[name] for name in sorted(topics)).encode()
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._rank, self._size, self._batch, self._context, self._seed = rank, size, batch, context, seed
        self.epoch = 0
        self.position = 0
        self._starts = self._order()

    def _order(self) -> Any:
        windows = (len(self._text) - 1) // self._context
        generator = torch.Generator().manual_seed(self._seed + self.epoch)
        return (torch.randperm(windows, generator=generator) * self._context)[self._rank :: self._size]

    def take(self) -> tuple[Any, Any]:
        """Return the next batch: bytes and the bytes that follow them, both ``(batch, context)``."""
        if self.position + self._batch > len(self._text) // self._context // self._size:  # alike on all ranks
            self.epoch, self.position = self.epoch + 1, 0
            self._starts = self._order()
        starts = self._starts[self.position : self.position + self._batch].tolist()
        self.position += self._batch
        windows = torch.stack([self._text[start : start + self._context + 1] for start in starts]).long()
        return windows[:, :-1], windows[:, 1:]

    def skip(self, batches: int) -> None:
        """Go to the place after the first ``batches`` batches. Not collective."""
        self.epoch, position = divmod(batches, len(self._text) // self._context // self._size // self._batch)
        self.position = position * self._batch
        self._starts = self._order()

    def state_dict(self) -> dict[str, int]:
        """Return the place in the text. Not collective."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a place in the text. Not collective."""
        self.epoch, self.position = state["epoch"], state["position"]
        self._starts = self._order()
