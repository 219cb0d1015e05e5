"""A part of a tensor of an old rank, and where its bytes go."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from ..state.leaves import Entry


class WantedPart(NamedTuple):
    """A wanted part of an old shard."""

    rank: int
    number: int  # of the entry in the manifest of that rank
    source: tuple[int, ...]  # where the part begins in that shard
    shape: tuple[int, ...]
    target: np.ndarray  # where it goes, ``(*shape, item bytes)`` uint8


def items(raw: np.ndarray, entry: Entry) -> np.ndarray:
    """View the bytes of an entry as ``(*shape, item bytes)``."""
    return raw.reshape(*entry.shape, entry.nbytes // max(1, math.prod(entry.shape)))
