"""Convert objects of frameworks to bytes and tensors: pickle them, and unpickle them with a loader that runs no code.

States of frameworks contain objects of their own (Megatron's ShardedTensor, argparse's Namespace, ...), which only
pickle can restore. A pickle may name any function to call. This loader makes only objects of the tables in `known`, and
each only in the way of its table. Tensors are not pickled; they go into the slot like other tensors.
"""

from __future__ import annotations

import collections
import enum
import importlib
import io
import pickle
import types
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mlflash.errors import CorruptSlot, StateError
from mlflash.state.plain_values import encode_plain

from . import known

_MARK = "object of mlflash.adapters.anything"
_allowed: set[tuple[str, str]] = set()


def allow(*classes: Any) -> None:
    """Allow classes or functions that mlflash does not know to be saved and loaded, such as classes of your own.

    Not collective. Call it before a save or a load. Any checkpoint may then call them with any arguments and any state.
    So do not allow a class that opens files or starts something when it is made.
    """
    _allowed.update((allowed.__module__, allowed.__qualname__) for allowed in classes)


def dump(value: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Pickle a value without its tensors.

    Returns:
        The pickle, and the tensors in the order in which the pickle names them.

    Raises:
        StateError: something in the value cannot be pickled, or `load` would refuse it.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(value)
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        raise StateError(f"an object in the state cannot be pickled: {error}") from error
    return file.getvalue(), pickler.tensors


def load(pickled: bytes, tensors: Sequence[torch.Tensor]) -> Any:
    """Unpickle what `dump` gave.

    Raises:
        CorruptSlot: the pickle is damaged, or names something that may not be loaded; see `allow`.
    """
    try:
        return _Unpickler(io.BytesIO(pickled), tensors).load()
    except Exception as error:  # a damaged pickle may raise anything
        raise CorruptSlot(f"the pickled objects of the state cannot be loaded: {error}") from error


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO):
        super().__init__(file, protocol=4)
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}  # a tensor that occurs twice is saved once

    def persistent_id(self, value: Any) -> int | None:
        if type(value) is not torch.Tensor:
            return None
        number = self._numbers.setdefault(id(value), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(value)
        return number

    def reducer_override(self, value: Any) -> Any:
        """Split tensors of other classes into plain ones: quantized weights (FP8, MXFP8) consist of several."""
        if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
            module = pickle.whichmodule(value, value.__qualname__)  # type: ignore[attr-defined]
            if _way(module, value.__qualname__) is None:
                raise pickle.PicklingError(_unknown(module, value.__qualname__))
        if (reduced := known.reduced(value)) is not None:
            return reduced
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        kind = type(value)
        if kind is torch.nn.Parameter:
            return known.parameter, (value.data, value.requires_grad)
        if is_traceable_wrapper_subclass(value):
            names, context = value.__tensor_flatten__()
            parts = {name: getattr(value, name) for name in names}
            return _rebuild, (kind, parts, context, tuple(value.size()), tuple(value.stride()), value.requires_grad)
        if kind.__reduce_ex__ is not torch.Tensor.__reduce_ex__:  # as in Transformer Engine's classes
            return NotImplemented
        raise pickle.PicklingError(f"a tensor of {kind.__module__}.{kind.__qualname__} does not say which tensors it "
                                   "is made of: it has no __tensor_flatten__")  # fmt: skip


def _rebuild(
    kind: type, parts: dict[str, Any], context: Any, size: tuple[int, ...], stride: tuple[int, ...], grad: bool
) -> torch.Tensor:
    if not isinstance(kind, type) or _way(kind.__module__, kind.__qualname__) is not _Way.ALLOWED:
        raise pickle.UnpicklingError(f"{kind!r} is not a class of tensors that you have allowed")
    tensor: torch.Tensor = kind.__tensor_unflatten__(parts, context, torch.Size(size), stride)  # type: ignore[attr-defined]
    return tensor.requires_grad_(grad) if grad else tensor


class _Way(enum.Enum):
    """How a pickle may use something that it names, see `known`. It may use what the user allowed in any way."""

    CALLED, DATA, ENUM, VALUE, ALLOWED = range(5)


def _way(module: str, name: str) -> _Way | None:
    """Give the way in which a pickle may use something that it names. None: not at all."""
    if (module, name) in _allowed:
        return _Way.ALLOWED
    if (module, name) in known.CALLED or (module, name) in known.METHODS or (module, name) == (__name__, "_rebuild"):
        return _Way.CALLED
    tables = {_Way.DATA: known.DATA, _Way.ENUM: known.ENUMS, _Way.VALUE: known.VALUES}
    return next((way for way, table in tables.items() if name in table.get(module, ())), None)


# Older opcodes for calls, and numbers for what other libraries have registered. `dump` writes none of them.
_OTHER_CALLS = [code[0] for code in (pickle.INST, pickle.OBJ, pickle.EXT1, pickle.EXT2, pickle.EXT4)]


_PYTHON: Any = pickle._Unpickler
_LISTS = (list, collections.deque)


class _Unpickler(pickle._Unpickler):
    """Python's own unpickler, with a check in each opcode that calls something or changes an object.

    It is the one written in Python. The one in C sets attributes of anything that a pickle names, even of classes.

    Args:
        file: contains the pickle.
        tensors: the tensors that the pickle names by number.
    """

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {**pickle._Unpickler.dispatch}
    stack: list[Any]
    metastack: list[list[Any]]

    def __init__(self, file: io.BytesIO, tensors: Sequence[torch.Tensor]):
        super().__init__(file)
        self._tensors = tensors
        self._ways: dict[int, tuple[_Way, Any]] = {}  # by id; it holds the objects, so that ids stay valid

    def persistent_load(self, number: Any) -> torch.Tensor:
        if type(number) is not int or not 0 <= number < len(self._tensors):
            raise pickle.UnpicklingError(f"there is no tensor {number!r}")
        return self._tensors[number]

    def find_class(self, module: str, name: str) -> Any:
        way = _way(module, name)
        if way is None:
            raise pickle.UnpicklingError(_unknown(module, name))
        found: Any = known.CALLED.get((module, name)) if way is _Way.CALLED else None
        if found is None:
            found = importlib.import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
        self._ways[id(found)] = way, found
        return found

    def _way_of(self, value: Any) -> _Way | None:
        return self._ways.get(id(value), (None, None))[0]

    def _made_by(self, value: Any) -> _Way | None:
        """Give the way in which the class of an object may be used. None for classes and functions themselves."""
        return None if isinstance(value, type) else self._way_of(type(value))

    def _call(self) -> None:
        arguments, function = self.stack.pop(), self.stack[-1]
        way = self._way_of(function)
        is_value = len(arguments) == 1 and type(arguments[0]) in (int, str)
        if way in (_Way.CALLED, _Way.ALLOWED) or (way is _Way.ENUM and is_value and issubclass(function, enum.Enum)):
            self.stack[-1] = function(*arguments)
            return
        raise pickle.UnpicklingError(f"refused to call {function!r}")

    def _make(self) -> None:
        arguments, kind = self.stack.pop(), self.stack.pop()
        way = self._way_of(kind)
        if way is _Way.DATA and issubclass(kind, tuple):
            self.stack.append(tuple.__new__(kind, arguments))
        elif way is _Way.ALLOWED or (way is _Way.DATA and not arguments):
            self.stack.append(kind.__new__(kind, *arguments))
        else:
            raise pickle.UnpicklingError(f"refused to make {kind!r} in this way")

    def _make_with_keywords(self) -> None:
        keywords, arguments, kind = self.stack.pop(), self.stack.pop(), self.stack.pop()
        if self._way_of(kind) is not _Way.ALLOWED:
            raise pickle.UnpicklingError(f"refused to make {kind!r} in this way")
        self.stack.append(kind.__new__(kind, *arguments, **keywords))

    def _set_state(self) -> None:
        made = self.stack[-2]
        way = self._made_by(made)
        if way is _Way.ALLOWED:
            _PYTHON.load_build(self)
            return
        state = self.stack.pop()
        if way is _Way.DATA or type(made) in _WITH_ATTRIBUTES:
            _set_attributes(made, state)
            return
        raise pickle.UnpicklingError(f"refused to set attributes of {made!r}")

    def _fill(self, made: Any, kinds: tuple[type, ...], load: Callable[[Any], None]) -> None:
        if not isinstance(made, kinds) and self._made_by(made) is not _Way.ALLOWED:
            raise pickle.UnpicklingError(f"refused to fill {made!r} in this way")
        load(self)

    def _refuse(self) -> None:
        raise pickle.UnpicklingError("mlflash writes no pickle of this kind")

    dispatch |= {
        pickle.REDUCE[0]: _call, pickle.NEWOBJ[0]: _make, pickle.NEWOBJ_EX[0]: _make_with_keywords,
        pickle.BUILD[0]: _set_state,
        pickle.APPEND[0]: lambda self: self._fill(self.stack[-2], _LISTS, _PYTHON.load_append),
        pickle.APPENDS[0]: lambda self: self._fill(self.metastack[-1][-1], _LISTS, _PYTHON.load_appends),
        pickle.SETITEM[0]: lambda self: self._fill(self.stack[-3], (dict,), _PYTHON.load_setitem),
        pickle.SETITEMS[0]: lambda self: self._fill(self.metastack[-1][-1], (dict,), _PYTHON.load_setitems),
        pickle.ADDITEMS[0]: lambda self: self._fill(self.metastack[-1][-1], (set,), _PYTHON.load_additems),
    } | dict.fromkeys(_OTHER_CALLS, _refuse)  # fmt: skip


_WITH_ATTRIBUTES = (types.SimpleNamespace, collections.OrderedDict, collections.Counter, collections.deque)


def _set_attributes(made: Any, state: Any) -> None:
    """Set attributes as pickle does, without ``__setattr__`` and ``__setstate__``, but none of Python's own."""
    values, slots = state if type(state) is tuple and len(state) == 2 else (state, None)
    for held in (values, slots):
        if held is not None and (type(held) is not dict or not all(_is_plain(name) for name in held)):
            raise pickle.UnpicklingError(f"refused to set these attributes of {type(made).__name__}: {held!r}")
    if values:
        vars(made).update(values)
    for name, value in (slots or {}).items():
        object.__setattr__(made, name, value)


def _is_plain(name: Any) -> bool:
    return type(name) is str and not (name.startswith("__") and name.endswith("__"))


def _unknown(module: str, name: str) -> str:
    return f"{module}.{name} is not allowed: if you trust it, call mlflash.adapters.pickles.allow({name})"


# A framework's checkpoint consists of nested dicts and lists with tensors, numbers, strings and a few objects of some
# class. What the core can save stays as it is, under its name. The objects go into a pickle, and a mark replaces each.


def apart(value: Any) -> dict[str, Any]:
    """Make a state for `Checkpointer.save` from nested dicts and lists. Tensors are not copied.

    Not collective. Dicts, lists and tuples are restored as such. A subclass of dict with tensors is restored as a dict.
    """
    objects: list[Any] = []
    tree = _without(value, objects, "")
    pickled, tensors = dump(objects)
    return {"tree": tree, "pickled": pickled, "tensors": tensors}


def together(state: dict[str, Any]) -> Any:
    """Undo `apart`, with the tensors of the state."""
    try:
        return _with(state["tree"], load(state["pickled"], state["tensors"]))
    except (LookupError, TypeError) as error:
        raise CorruptSlot(f"no adapter of mlflash wrote this state: {error!r}") from error


def _without(value: Any, objects: list[Any], path: str) -> Any:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value
    if type(value) is dict or (isinstance(value, dict) and _holds_tensors(value)):
        if value.keys() == {_MARK}:
            raise StateError("this dict looks like the mark that stands for an object, and would come back as one: use "
                             "another key", tensor=path)  # fmt: skip
        return {key: _without(sub, objects, f"{path}.{key}") for key, sub in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_without(sub, objects, f"{path}.{number}") for number, sub in enumerate(value))
    try:
        encode_plain(value, path)
    except StateError:
        objects.append(value)
        return {_MARK: len(objects) - 1}
    return value


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    subs = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return any(map(_holds_tensors, subs))


def _with(value: Any, objects: list[Any]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_MARK}:
            return objects[value[_MARK]]
        return {key: _with(sub, objects) for key, sub in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_with(sub, objects) for sub in value)
    return value
