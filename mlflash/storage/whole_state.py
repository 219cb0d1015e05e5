"""A checkpoint whose tensors are whole, as exporters get it, and what they report about what they wrote."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import StateError
from ..state import containers
from ..state.leaves import Entry, Tree
from ..state.plain_values import decode_plain
from .file_holes import Source

BATCH_NBYTES = 1 << 30


@dataclasses.dataclass(frozen=True)
class Whole:
    """A checkpoint in which every tensor is whole, whatever ranks saved it."""

    entries: Mapping[str, Entry]  # each tensor or array by its name, in the order of the state
    ties: Mapping[str, str]  # name → the earlier name that has the same memory; both are in `entries`
    tree: Tree  # the structure of the state. Its numbers are places in `entries` and `plain`
    plain: Sequence[Any]  # its plain leaves, encoded
    # reads tensors by name, (nbytes,) uint8 each, in C order. May be collective: all ranks read the same
    read: Callable[[Sequence[str]], dict[str, np.ndarray]] = lambda _: {}
    left_out: tuple[str, ...] = ()  # names of values that are not in it

    @property
    def own(self) -> list[Entry]:
        return [entry for name, entry in self.entries.items() if name not in self.ties]

    def sources(self, entries: Sequence[Entry]) -> dict[str, Source]:
        """Return functions that return the bytes of tensors, by name.

        The first call for a tensor of a batch reads the whole batch, and drops the batch before. If the calls come in
        order, each batch is read once, and in the same order on all ranks. A tensor of more bytes is a batch.
        """
        held: dict[str, np.ndarray] = {}

        def read(name: str, batch: Sequence[str]) -> np.ndarray:
            if name not in held:
                held.clear()  # frees the memory before the next batch is read
                held.update(self.read(batch))
            return held[name]

        batches = cut({entry.name: entry.nbytes for entry in entries}, BATCH_NBYTES)
        return {name: functools.partial(read, name, batch) for batch in batches for name in batch}


def cut(nbytes: Mapping[str, int], most_nbytes: int) -> list[list[str]]:
    """Divide names into groups, in order. What does not fit begins the next group, as with Hugging Face."""
    groups: list[list[str]] = []
    held = 0
    for name, more in nbytes.items():
        if not groups or held + more > most_nbytes:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += more
    return groups


@dataclasses.dataclass(frozen=True)
class Written:
    """What an export wrote."""

    files: Mapping[str, int]  # name → bytes
    tensors: int
    # name → the name under which its bytes are; the module of a format says what it does with them
    ties: Mapping[str, str] = dataclasses.field(default_factory=dict)
    left_out: tuple[str, ...] = ()  # names of plain leaves that the format cannot hold


def build(tree: Tree, tensor: Callable[[int], Any], plain: Callable[[int], Any]) -> Any:
    """Build a state anew: containers that ``torch.load`` knows, around what two functions make of tensors and leaves.

    Both get the number of the tensor or leaf, in the order of the state. Objects come back as what
    their ``state_dict`` returned, with its attributes.
    """
    tag, rest = tree[0], tree[1]
    if tag == "k":
        return containers.as_stock_class(build(rest, tensor, plain), *tree[2:])
    if tag == "o":
        return build(rest, tensor, plain)
    if tag == "e":
        return tensor(rest)
    if tag == "p":
        return plain(rest)
    if tag == "d":
        return {decode_plain(key): build(sub, tensor, plain) for key, sub in rest}
    items = [build(sub, tensor, plain) for sub in rest]
    return items if tag == "l" else tuple(items)


_ARRAY_DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
    "complex64", "complex128",
)  # fmt: skip


def tensor_dtype(entry: Entry) -> str:
    """Torch dtype of a tensor, or of an array as a tensor. Raises StateError if ``torch.load`` knows none for it."""
    if entry.kind == "tensor":
        if re.fullmatch("u?int[1-7]", entry.dtype):
            raise StateError("torch.load knows no tensors of this dtype: leave it out with --drop",
                             tensor=entry.name, found=entry.dtype)  # fmt: skip
        return entry.dtype
    dtype = np.dtype(entry.dtype)
    if dtype.name not in _ARRAY_DTYPES or not dtype.isnative:
        raise StateError("this array cannot be a tensor: leave it out with --drop", tensor=entry.name,
                         expected=f"{', '.join(_ARRAY_DTYPES)}, in native byte order",
                         found=f"{dtype.name} ({dtype.str})")  # fmt: skip
    return str(dtype.name)
