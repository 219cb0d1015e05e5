"""A nested state → leaves and a tree; faster if only the values have changed since the last time.

The first walk describes each tensor. From then on, `Flattener` only compares: containers by their classes and keys, all
tensors by one list of each property. That takes less than a microsecond per tensor; describing takes ten.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np

from ..errors import StateError
from . import containers, wrapped_tensors
from .copy_kernel import addresses
from .leaves import Entry, Flat, Leaf, Tree, array_entry, is_placed, is_tensor, tensor_entry
from .paths import entry_names
from .plain_values import MAX_DEPTH, encode_key, encode_plain

LEAF, PLAIN = "e", "p"
_BY_TYPE = frozenset((str, int, bool, bytes, type(None)))  # if two keys of such a type are equal, they are the same


@dataclasses.dataclass(eq=False, slots=True)
class _Node:
    kind: type
    keys: list[Any] | None
    subs: list[Any]  # what is in it, in order: a `_Node`, LEAF or PLAIN; for an object: what its state_dict() returned
    is_private: bool | None = None  # for an object: whether each rank has its own of it
    only: str | None = None  # LEAF or PLAIN, if nothing else is in it
    key_types: list[type] = dataclasses.field(init=False)  # types of its keys: 1 == True == 1.0
    codes: str | None = None  # its encoded keys, if two equal ones of one type may differ: 0.0 == -0.0
    code: containers.Code | None = None
    attributes: Any = None
    pattern: containers.Pattern | None = None

    def __post_init__(self) -> None:
        self.key_types = list(map(type, self.keys or ()))
        if not _BY_TYPE.issuperset(self.key_types):
            self.codes = _codes(self.keys or [])
        if all(sub is LEAF for sub in self.subs) or all(sub is PLAIN for sub in self.subs):
            self.only = self.subs[0] if self.subs else LEAF

    def is_other(self, value: Any) -> bool:
        """Whether a dict of this class, which is no plain one, has other attributes or another factory."""
        if self.pattern is not None:
            return not self.pattern.fits(containers.attributes_of(value))
        return not containers.fits(value, self.code)


def flatten(state: Any, unbegun: bool = True) -> Flat:
    """Take a state apart without copying any tensor; the leaves alias the live tensors.

    Args:
        unbegun: ask loaders that have not begun for their state; False, before it is filled: they have
            no leaves.

    Raises:
        StateError: a leaf cannot be saved (its path is named), or a container contains itself.
    """
    return _Walk(unbegun=unbegun).flatten(state)


def flatten_or_none(state: Any) -> Flat | None:
    """Take a state apart that will be filled, as `flatten` does; None if that is not possible."""
    try:
        return flatten(state, unbegun=False)
    except Exception:  # state_dict() of an object may raise anything
        return None


class Flattener:
    """Takes the states of a training apart, in turn; without ``objects``, it refuses one that has to be asked."""

    def __init__(self, objects: bool = True) -> None:
        self._known: _Known | None = None
        self._objects = objects

    def flatten(self, state: Any) -> Flat:
        """Take a state apart; see `flatten`. If it is like the one before, its structure is the very same object."""
        taken: dict[int, list[Any]] = {}
        if self._known is not None:
            flat = self._known.match(state, taken)
            if flat is not None:
                return flat
        self._known = None
        walk = _Walk(taken, self._objects)
        flat = walk.flatten(state)
        if set(walk.kinds) <= _known_kinds():
            self._known = _Known(walk, flat)
        return flat


class _Special:
    """The class, to this module, of tensors with attributes that may change while nothing else does."""


class _Changed(Exception):
    """A state is not like the one before."""


class _Known:
    """A state that was taken apart, as a pattern for others."""

    def __init__(self, walk: _Walk, flat: Flat):
        self._root, self._kinds = walk.root, walk.kinds
        self._structure, self._wholes = flat.structure, {n: _placing(whole) for n, whole in flat.wholes.items()}
        self._tied = [(number, tie) for number, tie in enumerate(flat.structure.ties) if tie >= 0]
        self._arrays = [number for number, kind in enumerate(walk.kinds) if kind is np.ndarray]
        self._tensors = [number for number, kind in enumerate(walk.kinds) if kind is not np.ndarray]
        self._array_columns = _columns(_pick(flat.values, self._arrays), _OF_ARRAYS)
        self._tensor_columns = _columns(_pick(flat.values, self._tensors), _OF_TENSORS)
        self._complex = [n for n in self._tensors if flat.values[n].is_complex()]
        self._complex_columns = _columns(_pick(flat.values, self._complex), _OF_COMPLEX)
        self._filled = [n for n, entry in enumerate(flat.structure.entries) if entry.nbytes]
        self._places = addresses(_pick(flat.values, self._filled))

    def match(self, state: Any, taken: dict[int, list[Any]]) -> Flat | None:
        """Take a state apart if it is like this one; ``taken`` gets what ``state_dict()`` of objects returned."""
        values: list[Any] = []
        plain: list[Any] = []
        try:
            self._gather(self._root, state, values, plain, taken)
            wholes = self._compare(values)
        except _Changed:  # not an error of state_dict(): that may be collective, and must not be called again
            return None
        try:
            return Flat(self._structure, values, [encode_plain(value, "") for value in plain], wholes)
        except StateError:  # for example, a tensor took the place of a number
            return None

    def _gather(self, node: Any, value: Any, values: list[Any], plain: list[Any], taken: dict[int, list[Any]]) -> None:
        if node is LEAF:
            values.append(value)
            return
        if node is PLAIN:
            plain.append(value)
            return
        if type(value) is not node.kind:
            raise _Changed
        items: Any = value
        if node.is_private is not None:
            if bool(getattr(value, "rank_private", False)) is not node.is_private:
                raise _Changed
            given = value.state_dict()
            taken.setdefault(id(value), []).append(given)
            items = (given,)
        elif node.keys is not None:
            keys = list(value)
            if keys != node.keys or list(map(type, keys)) != node.key_types:
                raise _Changed
            if node.codes is not None and _codes(keys) != node.codes:
                raise _Changed
            if node.code is not None and node.is_other(value):
                raise _Changed
            items = value.values()
        elif len(value) != len(node.subs):
            raise _Changed
        if node.only is not None:
            (values if node.only is LEAF else plain).extend(items)
            return
        for sub, item in zip(node.subs, items, strict=True):
            if sub is LEAF:
                values.append(item)
            elif sub is PLAIN:
                plain.append(item)
            else:
                self._gather(sub, item, values, plain, taken)

    def _compare(self, values: list[Any]) -> dict[int, Any]:
        """Compare leaves with those of the pattern; shards replace their DTensors, which are returned."""
        if list(map(type, values)) != self._kinds:
            raise _Changed
        wholes = {}
        for number, placing in self._wholes.items():
            wholes[number] = values[number]
            if _placing(values[number]) != placing:
                raise _Changed
            local = values[number] = values[number]._local_tensor
            if type(local) is not sys.modules["torch"].Tensor:  # for example, a collective has not filled it yet
                raise _Changed
        try:
            if (
                _columns(_pick(values, self._tensors), _OF_TENSORS) != self._tensor_columns
                or _columns(_pick(values, self._complex), _OF_COMPLEX) != self._complex_columns
                or _columns(_pick(values, self._arrays), _OF_ARRAYS) != self._array_columns
                or any(_memory(values[number]) != _memory(values[tie]) for number, tie in self._tied)
            ):
                raise _Changed
            self._compare_places(values)
        except RuntimeError:  # for example, a tensor is sparse now
            raise _Changed from None
        return wholes

    def _compare_places(self, values: list[Any]) -> None:
        """Find leaves that have other memory than before: it may belong to another leaf, or be freed."""
        filled = _pick(values, self._filled)
        places = addresses(filled)
        if places == self._places:
            return
        moved = [n for n, at, before in zip(self._filled, places, self._places, strict=True) if at != before]
        if any(is_tensor(values[n]) and not values[n].untyped_storage().nbytes() for n in moved):
            raise _Changed
        if len(set(places)) + len(self._tied) < len(places):
            begin_at: dict[int, list[Any]] = {}
            for number, at in zip(self._filled, places, strict=True):
                others = begin_at.setdefault(at, [])
                if self._structure.ties[number] < 0 and any(_is_tie(other, values[number]) for other in others):
                    raise _Changed
                others.append(values[number])
        self._places = places


def _codes(keys: list[Any]) -> str:
    return repr([encode_key(key, "") for key in keys])


def _pick(values: list[Any], numbers: list[int]) -> list[Any]:
    return values if len(numbers) == len(values) else [values[number] for number in numbers]


class _Walk:
    """One walk through a state; ``taken``: what ``state_dict()`` of objects, by id, has already returned."""

    def __init__(
        self, taken: Mapping[int, list[Any]] | None = None, objects: bool = True, unbegun: bool = True
    ) -> None:
        self.objects, self.unbegun = objects, unbegun
        self.leaves: list[Leaf] = []
        self.plain: list[Any] = []
        self.memory: dict[tuple[Any, ...], int] = {}
        self.open: set[int] = set()
        self.private: list[int] = []
        self.torch = sys.modules.get("torch")
        self.taken = taken or {}
        self.root: Any = None
        self.kinds: list[type] = []

    def flatten(self, state: Any) -> Flat:
        try:
            # Otherwise autograd records each shard that is taken out of a DTensor.
            with contextlib.nullcontext() if self.torch is None else self.torch.no_grad():
                self.root = self.visit(state, "")
            tree = _Numbered().tree(self.root)
            names = entry_names(tree, [_as_text(leaf.entry.name) for leaf in self.leaves])
        except RecursionError as error:
            raise StateError(f"the state is nested too deeply for the stack that save() has here: {error}") from None
        leaves = [leaf if leaf.entry.name == name else dataclasses.replace(leaf, entry=msgspec.structs.replace(
            leaf.entry, name=name)) for leaf, name in zip(self.leaves, names, strict=True)]  # fmt: skip
        return Flat.of(leaves, tree, self.plain, frozenset(names[number] for number in self.private))

    def visit(self, value: Any, path: str, depth: int = 0) -> Any:
        if depth > MAX_DEPTH:
            raise StateError(f"the state is more than {MAX_DEPTH} levels deep", tensor=path)
        if self.torch is not None and isinstance(value, self.torch.Tensor):
            part = wrapped_tensors.found_in(value, path)
            return self.leaf(value, *tensor_entry(self.torch, value, path)) if part is None else self.wrapped(
                value, *part, path, depth + 1)  # fmt: skip
        if isinstance(value, np.ndarray):
            return self.leaf(value, *array_entry(value, path))
        an_object = is_object(value)
        if an_object and not self.objects:
            raise StateError("this object would have to be asked for its state", tensor=path)
        if an_object or isinstance(value, (dict, list, tuple)):
            if id(value) in self.open:
                raise StateError("the state contains itself", tensor=path)
            self.open.add(id(value))
            node = self.object(value, path, depth + 1) if an_object else self.container(value, path, depth + 1)
            self.open.remove(id(value))
            return node
        self.plain.append(encode_plain(value, path))
        return PLAIN

    def container(self, value: Any, path: str, depth: int) -> _Node:
        prefix, code = path + "." if path else "", containers.code_of(value, path)
        if not isinstance(value, dict):
            return _Node(type(value), None, [self.visit(v, f"{prefix}{i}", depth) for i, v in enumerate(value)],
                         code=code)  # fmt: skip
        for key in value:
            encode_key(key, path)
        subs = [self.visit(v, f"{prefix}{k}", depth) for k, v in value.items()]
        attributes = containers.attributes_of(value)
        pattern = containers.Pattern(attributes) if code == ["OrderedDict"] else None
        return _Node(type(value), list(value), subs, code=code, pattern=pattern,
                     attributes=containers.encode_attributes(attributes, path))  # fmt: skip

    def wrapped(self, value: Any, tensor: Any, shard: wrapped_tensors.Shard | None, path: str, depth: int) -> _Node:
        self.kinds.append(_Special)
        inner = wrapped_tensors.inner_of(tensor)
        subs = [self.visit(part, f"{path}.{name}" if path else name, depth) for name, part in inner.items()]
        return _Node(type(value), list(inner), subs, code=wrapped_tensors.code_of(tensor),
                     attributes=wrapped_tensors.attributes_of(tensor, path, shard))  # fmt: skip

    def object(self, value: Any, path: str, depth: int) -> _Node:
        before = len(self.leaves)
        is_private = bool(getattr(value, "rank_private", False))
        if self.torch is not None and isinstance(value, self.torch.nn.Module):
            _refuse_full_on_rank_0(value, path)
        if self.taken.get(id(value)):
            given = self.taken[id(value)].pop(0)
        else:
            given = value.state_dict() if self.unbegun or not has_not_begun(value) else {}
        node = _Node(type(value), None, [self.visit(given, path, depth)], is_private)
        if is_private:
            self.private += range(before, len(self.leaves))
        return node

    def leaf(self, value: Any, local: Any, entry: Entry, key: tuple[Any, ...] | None) -> str:
        tie = -1 if key is None else self.memory.setdefault(key, len(self.leaves))
        whole = value if type(value).__name__ == "DTensor" else None
        self.kinds.append(_Special if is_placed(value) else type(value))
        self.leaves.append(Leaf(entry, local, -1 if tie == len(self.leaves) else tie, whole))
        return LEAF


class _Numbered:
    """Numbers leaves and plain leaves in the order in which a walk comes to them."""

    def __init__(self) -> None:
        self._counts = {LEAF: itertools.count(), PLAIN: itertools.count()}

    def tree(self, node: Any) -> Tree:
        if not isinstance(node, _Node):
            return [node, next(self._counts[node])]
        subs = [self.tree(sub) for sub in node.subs]
        if node.is_private is not None:
            return ["o", *subs]
        if node.keys is None:
            plain = ["l" if issubclass(node.kind, list) else "t", subs]
        else:
            plain = ["d", [[encode_key(key, ""), sub] for key, sub in zip(node.keys, subs, strict=True)]]
        return plain if node.code is None else ["k", plain, node.code, node.attributes]


def _as_text(name: str) -> str:
    """A name as valid text: half a character is escaped."""
    return name if name.isascii() else name.encode("utf-8", "backslashreplace").decode()


def _refuse_full_on_rank_0(module: Any, path: str) -> None:
    """Refuse an FSDP1 model whose ``state_dict()`` has everything on rank 0: other ranks could not load it."""
    fsdp1 = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    if fsdp1 is None:
        return
    for submodule in module.modules():
        if isinstance(submodule, fsdp1) and getattr(submodule._state_dict_config, "rank0_only", False):
            raise StateError("the state dict of this FSDP1 model is full on rank 0 and empty elsewhere: set "
                             "rank0_only=False, or save what mlflash.adapters.fsdp.sharded_state_dict gives",
                             tensor=path or "(the state itself)")  # fmt: skip


def is_object(value: Any) -> bool:
    """Whether something is an object that saves and loads itself by ``state_dict`` and ``load_state_dict``."""
    if isinstance(value, type):
        return False
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


_OF_TENSORS: tuple[Callable[[list[Any]], list[Any]], ...] = (
    lambda tensors: [tensor.dtype for tensor in tensors],
    lambda tensors: [tensor.shape for tensor in tensors],
    lambda tensors: [tensor.device for tensor in tensors],
    lambda tensors: [tensor.is_contiguous() for tensor in tensors],  # raises for tensors that are not strided
    lambda tensors: [tensor.is_neg() for tensor in tensors],
    lambda tensors: [hasattr(tensor, "global_shape") for tensor in tensors],  # see `leaves.is_placed`
)
_OF_COMPLEX: tuple[Callable[[list[Any]], list[Any]], ...] = (lambda tensors: [tensor.is_conj() for tensor in tensors],)
_OF_ARRAYS: tuple[Callable[[list[Any]], list[Any]], ...] = (
    lambda arrays: [array.dtype for array in arrays],
    lambda arrays: [array.shape for array in arrays],
    lambda arrays: [array.flags.c_contiguous for array in arrays],
)


def _columns(values: list[Any], columns: tuple[Callable[[list[Any]], list[Any]], ...]) -> list[list[Any]]:
    return [column(values) for column in columns]


def _placing(whole: Any) -> tuple[Any, ...]:
    return whole.device_mesh, whole.placements, whole.shape


def _memory(value: Any) -> tuple[Any, ...]:
    """What is equal for tied leaves."""
    if isinstance(value, np.ndarray):
        return value.__array_interface__["data"][0], value.strides
    return value.data_ptr(), value.stride()


def _is_tie(first: Any, second: Any) -> bool:
    """Whether two leaves that begin at one place are the same."""
    if isinstance(first, np.ndarray) is not isinstance(second, np.ndarray):
        return False
    return (first.dtype, first.shape, _memory(first)) == (second.dtype, second.shape, _memory(second))


def _known_kinds() -> set[type]:
    """Classes of leaves for which this comparison covers everything that a slot holds."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {np.ndarray}
    dtensor = sys.modules.get("torch.distributed.tensor")
    return {np.ndarray, torch.Tensor, torch.nn.Parameter, *([dtensor.DTensor] if dtensor is not None else [])}


# Loaders of torchdata begin if they are asked for their state: a ``StatefulDataLoader`` starts its workers and draws a
# random number for them; one of ``torchdata.nodes`` goes on with the iterator that it made for this, and ignores the
# state that is loaded after it. Nothing imports torchdata here.


_ITERATOR_AND_LOADED = {
    ("torchdata.stateful_dataloader.stateful_dataloader", "StatefulDataLoader"): ("_iterator", "next_iter_state"),
    ("torchdata.nodes.loader", "Loader"): ("_it", "_next_iter_state_dict"),
}
"""Names of a class, of the attribute with its iterator and of the one with a state that the next iterator will take."""


def has_not_begun(live: Any) -> bool:
    """Whether an object is such a loader, and has no iterator."""
    names = _names(live)
    return names is not None and getattr(live, names[0], live) is None


@dataclasses.dataclass(frozen=True)
class Unbegun:
    """What a loader had that has not begun: the state that its first iterator will take, if one was loaded."""

    loaded: Any

    @classmethod
    def of(cls, live: Any) -> Unbegun:
        return cls(getattr(live, _attributes(live)[1]))

    def put_back(self, live: Any) -> None:
        """Let a loader be as it was, whatever it has loaded since."""
        iterator, loaded = _attributes(live)
        setattr(live, iterator, None)
        setattr(live, loaded, self.loaded)


def forget_early_iterator(live: Any) -> None:
    """Let a loader go on with the state that it has loaded, not with the iterator that it made when it was asked."""
    if _names(live) is not None and hasattr(live, "_iter_for_state_dict"):
        live._iter_for_state_dict = False


def _attributes(live: Any) -> tuple[str, str]:
    names = _names(live)
    assert names is not None, "a loader of torchdata"
    return names


def _names(live: Any) -> tuple[str, str] | None:
    for (module, name), names in _ITERATOR_AND_LOADED.items():
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and isinstance(live, kind):
            return names
    return None
