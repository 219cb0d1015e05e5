"""Tensors to write, read a batch at a time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from ..state.leaves import Entry, as_bytes
from ..storage.file_holes import Source
from ..storage.whole_state import Whole
from .formulas import Formula, Saved

BATCH_NBYTES = 1 << 30


@dataclasses.dataclass(frozen=True)
class Output:
    """A tensor or array to write.

    Attributes:
        entry: its name, dtype and shape. It is whole.
        formula: how it is made.
        tie: name of an earlier output with the same formula, or None.
    """

    entry: Entry
    formula: Formula
    tie: str | None = None


class Batches:
    """The bytes of outputs, in batches that follow from their sizes only.

    A request for the first output of a batch reads all tensors of the batch. A request for another batch drops them. If
    the requests come in order, each batch is read once, and in the same order on all ranks.

    Args:
        whole: the checkpoint.
        outputs: the outputs, in the order of the requests.
        batch_nbytes: most bytes that a batch reads. One output may need more.
    """

    def __init__(self, whole: Whole, outputs: Sequence[Output], batch_nbytes: int = BATCH_NBYTES):
        self._whole = whole
        self._batches: list[tuple[str, ...]] = []
        self._batch_of: dict[str, int] = {}
        self._current = -1
        self._raw: dict[str, np.ndarray] = {}
        names: dict[str, int] = {}
        nbytes = 0
        for output in outputs:
            sources = {name: whole.entries[name].nbytes for name in output.formula.sources}
            more = sum(sources[name] for name in sources if name not in names)
            if names and nbytes + more > batch_nbytes:
                self._batches.append(tuple(names))
                names, nbytes, more = {}, 0, sum(sources.values())
            names.update(sources)
            nbytes += more
            self._batch_of[output.entry.name] = len(self._batches)
        self._batches.append(tuple(names))

    def source(self, output: Output) -> Source:
        """Return a function that returns the bytes of an output. A call of it is collective if reading is."""
        return lambda: self._make(output)

    def _make(self, output: Output) -> np.ndarray:
        batch = self._batch_of[output.entry.name]
        if batch != self._current:
            self._raw = {}  # free the memory before the next batch is read
            self._raw = self._whole.bytes_of(self._batches[batch])
            self._current = batch
        if isinstance(output.formula, Saved):
            return self._raw[output.formula.name]
        return as_bytes(np.ascontiguousarray(output.formula.make(self._elements)))

    def _elements(self, name: str) -> np.ndarray:
        entry = self._whole.entries[name]
        nbytes = item_nbytes(entry)
        return self._raw[name].view(_OPAQUE.get(nbytes, f"V{nbytes}")).reshape(entry.shape)


_OPAQUE = {0: "u1", 1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}  # NumPy copies these faster than V2, V4, …


def item_nbytes(entry: Entry) -> int:
    """Return the bytes of an element; 0 if there are no elements."""
    count = math.prod(entry.shape)
    return entry.nbytes // count if count else 0
