"""What a PyTorch DCP plan wrote into slots (see `mlflash.adapters.dcp`), as exporters and drains need it.

The slot of a rank has the tensors of its plan, each by its name and where it begins in the whole; an index of what
belongs to the checkpoint (the slot may hold more); and one blob of everything that is bytes: what DCP pickles.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import logging
import pickle
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..errors import CorruptSlot, StateError
from ..state.leaves import Entry, Tree
from ..state.plain_values import decode_plain, encode_key, encode_plain

log = logging.getLogger("mlflash")

INDEX, BYTES = ".dcp.index", ".dcp.bytes"
TOLD = (INDEX, BYTES)  # what must be known of every rank
BYTES_NUMBER = 1  # the blob is the second leaf

Key = tuple[str, tuple[int, ...]]
"""Name of a tensor, and where the part begins in it."""

Path = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True)
class Index:
    """Which of a slot's entries belong to the checkpoint."""

    tensors: tuple[Key, ...]
    parts: dict[str, tuple[int, int]]  # the parts that are bytes, by name: where each begins and ends in the blob
    # what the planner stores with the checkpoint, as `torch.save` wrote it, in base64; on one rank
    planner_data: str | None = None

    def encode(self) -> bytes:
        return json.dumps(vars(self), separators=(",", ":")).encode()

    @staticmethod
    def decode(text: bytes) -> Index:
        """Undo `encode`; blanks may follow. Raises CorruptSlot if it is not an index."""
        try:
            document = json.loads(text)
            tensors = tuple((str(name), tuple(int(n) for n in offset)) for name, offset in document["tensors"])
            places = {str(name): (int(start), int(end)) for name, (start, end) in document["parts"].items()}
            return Index(tensors, places, document["planner_data"])
        except (ValueError, TypeError, LookupError) as error:
            raise CorruptSlot(f"the index of a DCP checkpoint is damaged: {error!r}") from None

    def names(self) -> Iterator[str]:
        yield from dict.fromkeys(name for name, _ in self.tensors)
        yield from self.parts

    def kept(self) -> Any:
        """What the planner stores with the checkpoint; None if it is more than data, which is not loaded."""
        if self.planner_data is None:
            return None
        try:
            return _load(base64.b64decode(self.planner_data))
        except pickle.UnpicklingError as error:
            log.warning(
                "the data that the planner stored with the checkpoint is not loaded: %s", str(error).splitlines()[0]
            )
            return None

    def paths(self) -> dict[str, Path]:
        """Where each name is in the nested state; nothing if the planner has told another rank, or none."""
        kept = self.kept()
        return {str(name): path for name, path in kept.items() if path} if _maps_to_paths(kept) else {}


def is_planned(tree: Tree) -> bool:
    """Whether the state of a slot was written by a plan."""
    tag, rest = tree[0], tree[1]
    return bool(tag == "d" and rest and rest[0][0] == INDEX)


def keys_of(tree: Tree) -> dict[Key, int]:
    """The tensors of a slot, and the numbers of their entries. Raises CorruptSlot if no plan has written it."""
    try:
        keys = [(decode_plain(key), number) for key, (_, number) in tree[1]]
        return {(str(key[0]), tuple(key[1:])): number for key, number in keys if isinstance(key, tuple)}
    except (ValueError, TypeError, LookupError) as error:
        raise CorruptSlot(f"the tree of a DCP checkpoint is damaged: {error!r}") from None


def names_of(tree: Tree, entries: Iterable[Entry]) -> dict[str, str]:
    """Name of each entry of a tensor → its name in the plan: the second part of one is ``name~2`` in the slot."""
    listed = list(entries)
    return {listed[number].name: key[0] for key, number in keys_of(tree).items()}


def values(index: Index, blob: bytes) -> dict[str, tuple[Tree, list[Any]]]:
    """What a rank wrote that is not a tensor, by name: a tree, and its plain leaves; without what is more than data."""
    value_of = {}
    for name, (start, end) in index.parts.items():
        plain: list[Any] = []
        try:
            value_of[name] = (_tree_of(_load(blob[start:end]), name, plain), plain)
        except (StateError, pickle.UnpicklingError) as error:
            log.debug("not for other programs: %s: %s", name, str(error).splitlines()[0])
    return value_of


def _load(raw: bytes) -> Any:
    """Load what `torch.save` wrote if it is only data: otherwise raise UnpicklingError, and run nothing."""
    import torch

    return torch.load(io.BytesIO(raw), weights_only=True)


def _tree_of(value: Any, path: str, plain: list[Any]) -> Tree:
    """A value of plain leaves as the tree of a state; adds the leaves to ``plain``."""
    if isinstance(value, Mapping):
        return ["d", [[encode_key(key, path), _tree_of(sub, f"{path}.{key}", plain)] for key, sub in value.items()]]
    if isinstance(value, (list, tuple)):
        subs = [_tree_of(sub, f"{path}.{number}", plain) for number, sub in enumerate(value)]
        return ["l" if isinstance(value, list) else "t", subs]
    plain.append(encode_plain(value, path))
    return ["p", len(plain) - 1]


def _maps_to_paths(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(path, tuple) and all(type(part) in (str, int) for part in path) for path in value.values()
    )
