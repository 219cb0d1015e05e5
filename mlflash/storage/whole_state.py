"""What an exporter gets, and what it reports about what it wrote."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from ..errors import StateError
from ..state import containers
from ..state.leaves import Entry, Tree
from ..state.plain_values import decode_plain


class Whole(Protocol):
    """A checkpoint in which every tensor is whole, whatever ranks saved it.

    Attributes:
        step: of the training.
        entries: each tensor or array by its name, in the order of the state.
        ties: name → the earlier name that has the same memory; both are in ``entries``.
        tree: the structure of the state.
        plain: its plain leaves, encoded.
    """

    @property
    def step(self) -> int: ...
    @property
    def entries(self) -> Mapping[str, Entry]: ...
    @property
    def ties(self) -> Mapping[str, str]: ...
    @property
    def tree(self) -> Tree: ...
    @property
    def plain(self) -> Sequence[Any]: ...

    def bytes_of(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Read tensors: ``(nbytes,)`` uint8 each, in C order. May be collective: all ranks ask for the same."""


@dataclasses.dataclass(frozen=True)
class Written:
    """What an export wrote.

    Attributes:
        files: name → bytes.
        tensors: number of tensors and arrays in them.
        ties: name → the name under which its bytes are; the module of a format says what it does with them.
        left_out: names of plain leaves that the format cannot hold.
    """

    files: Mapping[str, int]
    tensors: int
    ties: Mapping[str, str] = dataclasses.field(default_factory=dict)
    left_out: tuple[str, ...] = ()


def build(tree: Tree, tensor: Callable[[int], Any], plain: Callable[[int], Any]) -> Any:
    """Build a state anew: containers that ``torch.load`` knows, around what two functions make of tensors and leaves.

    Not collective. Both get the number of the tensor or leaf, in the order of the state. Objects come back as what
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
    """Name of the torch dtype that a tensor has, or that an array has as a tensor.

    Not collective.

    Raises:
        StateError: there is none, its bytes are in the other order, or torch has the dtype but cannot load it.
    """
    if entry.kind == "tensor":
        if re.fullmatch("u?int[1-7]", entry.dtype):
            raise StateError("torch.load knows no tensors of this dtype: drop it by a rule of the mapping",
                             tensor=entry.name, found=entry.dtype)  # fmt: skip
        return entry.dtype
    dtype = np.dtype(entry.dtype)
    if dtype.name not in _ARRAY_DTYPES or not dtype.isnative:
        raise StateError("this array cannot be a tensor: drop it by a rule of the mapping", tensor=entry.name,
                         expected=f"{', '.join(_ARRAY_DTYPES)}, in native byte order",
                         found=f"{dtype.name} ({dtype.str})")  # fmt: skip
    return str(dtype.name)
