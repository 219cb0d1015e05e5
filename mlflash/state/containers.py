"""Classes of containers, and the attributes of a state dict: what of a container is not its items.

Reading a checkpoint makes no other class than those named here, and named tuples that the program has already loaded;
it runs no code of these.

A container that is no plain dict, list or tuple is a node ``["k", container, class, attributes]`` of a tree: what it
would be as a plain one; ``[name, ...]``, see `code_of`; and an encoded dict, or None. So is a tensor that wraps others:
see `wrapped_tensors`.
"""

from __future__ import annotations

import collections
import copy
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import StateError, StructureMismatch
from . import wrapped_tensors
from .plain_values import MAX_DEPTH, check_plain, decode_plain, encode_key, encode_plain

Code = list[Any]
"""A class: its name, and for a defaultdict the name of its factory, for a named tuple its module, name and fields."""

FACTORIES: Mapping[str, Callable[[], Any] | None] = {
    "None": None, **{kind.__name__: kind for kind in (bool, bytes, complex, dict, float, int, list, set, str, tuple)}
}  # fmt: skip
"""Factories of a defaultdict, by name."""

_PLAIN = (dict, list, tuple)
_EXCHANGEABLE = (None, ["OrderedDict"], ["Size"])
_SIMPLE: Mapping[str, type[dict[Any, Any]]] = {"OrderedDict": collections.OrderedDict, "Counter": collections.Counter}


def code_of(value: dict[Any, Any] | Sequence[Any], path: str) -> Code | None:
    """The class of a container, encoded; None: a plain one. Raises StateError if it would come back as another."""
    kind: Any = type(value)
    where = path or "(the state itself)"
    if kind in _PLAIN:
        return None
    if kind in _SIMPLE.values():
        return [kind.__name__]
    if kind.__module__ == "torch" and kind.__name__ == "Size":
        return ["Size"]
    if kind is collections.defaultdict:
        factory = value.default_factory  # type: ignore[union-attr]
        for name, known in FACTORIES.items():
            if factory is known:
                return ["defaultdict", name]
        raise StateError(f"a defaultdict comes back only if its factory is one of {', '.join(FACTORIES)}: save "
                         "dict(...) of it", tensor=where, found=repr(factory))  # fmt: skip
    code = ["namedtuple", kind.__module__, kind.__qualname__, *getattr(kind, "_fields", ())]
    if _named_tuple(code) is kind:
        return code
    plain = next(container.__name__ for container in _PLAIN if isinstance(value, container))
    raise StateError(f"a container of this class would come back as a {plain}: save {plain}(...) of it", tensor=where,
                     found=f"{kind.__module__}.{kind.__qualname__}")  # fmt: skip


def _named_tuple(code: Code) -> Any:
    """The class of named tuples that has a name in the modules that are loaded; None if there is none."""
    _, module, name, *fields = code
    kind = wrapped_tensors.loaded(module, name)
    has_fields = isinstance(kind, type) and kind.__bases__ == (tuple,) and vars(kind).get("_fields") == tuple(fields)
    return kind if has_fields else None


def as_class(items: Any, code: Code, attributes: Any) -> Any:
    """Make a container of a class from a plain one. Raises StructureMismatch if a named tuple's class is not loaded."""
    if code[0] == "namedtuple":
        kind = _named_tuple(code)
        if kind is None:
            raise StructureMismatch("the checkpoint holds a named tuple whose class is not loaded, or has other "
                                    "fields: import it first", expected=".".join(code[1:3]))  # fmt: skip
        return tuple.__new__(kind, items)  # runs no code of the class
    if code[0] == wrapped_tensors.WRAPPED:
        return wrapped_tensors.make(items, code, attributes)
    if code[0] == "defaultdict":
        return collections.defaultdict(FACTORIES[code[1]], items)
    return as_stock_class(items, code, attributes)


def as_stock_class(items: Any, code: Code, attributes: Any) -> Any:
    """Make a container of a class as `as_class`, if ``torch.load`` knows it; otherwise leave it plain."""
    if code[0] == "Size":
        import torch

        return torch.Size(items)
    if code[0] not in _SIMPLE:
        return items
    made = _SIMPLE[code[0]]()
    for key, value in items.items():  # update() of a Counter adds them up
        made[key] = value
    set_attributes(made, attributes)
    return made


def fits(live: Any, code: Code | None) -> bool:
    """Whether a live container can be filled: it has the class. A dict and an OrderedDict may stand for each other."""
    try:
        own = code_of(live, "")
    except StateError:
        return False
    return own == code or (own in _EXCHANGEABLE and code in _EXCHANGEABLE)


def check(code: Any, attributes: Any) -> None:
    """Raise ValueError, or what decoding raises, if a class or attributes that were read are none."""
    name, *more = code
    if name == wrapped_tensors.WRAPPED:
        wrapped_tensors.check(code, attributes)
        return
    known = not more if name in (*_SIMPLE, "Size") else all(isinstance(text, str) for text in more) and (
        (name == "defaultdict" and len(more) == 1 and more[0] in FACTORIES) or (name == "namedtuple" and len(more) > 1)
    )  # fmt: skip
    if not known:
        raise ValueError(f"no container is of the class {code!r}")
    if attributes is not None:
        if name != "OrderedDict" or attributes[0] != "d" or not all(type(key) is str for key, _ in attributes[1]):
            raise ValueError("attributes of a container without attributes")
        _check_constant(attributes)


# Attributes


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The attributes that a container keeps when it is pickled; None if there are none."""
    return vars(value) or None if type(value) is collections.OrderedDict else None


def set_attributes(live: Any, attributes: Any) -> None:
    """Give encoded attributes to an OrderedDict in the place of its own."""
    if type(live) is collections.OrderedDict:
        vars(live).clear()
        if attributes is not None:
            vars(live).update(_decode(attributes))


def encode_attributes(attributes: Mapping[str, Any] | None, path: str) -> Any:
    """Encode attributes. Raises StateError if an attribute cannot be saved."""
    return None if attributes is None else _encode(dict(attributes), path, 0)


class Pattern:
    """Attributes as they were, to compare others with: in C, as there may be thousands of modules."""

    def __init__(self, attributes: Mapping[str, Any] | None):
        self._kept, self._text = copy.deepcopy(attributes), _text(attributes)

    def fits(self, attributes: Mapping[str, Any] | None) -> bool:
        """Whether others are the same, type for type. If that cannot be known, they are not."""
        return self._kept == attributes and (attributes is None or (self._text is not None and
                                                                    self._text == _text(attributes)))  # fmt: skip


def _text(attributes: Mapping[str, Any] | None) -> str | None:
    """A text that differs where values are equal, and their types are not: 1 == True == 1.0."""
    try:
        return json.dumps(attributes)
    except (TypeError, ValueError):
        return None


def _encode(value: Any, path: str, depth: int) -> list[Any]:
    if depth > MAX_DEPTH:
        raise StateError(f"the state is more than {MAX_DEPTH} levels deep", tensor=path)
    if not isinstance(value, _PLAIN):
        return ["v", encode_plain(value, path)]
    if isinstance(value, dict):
        plain = ["d", [[encode_key(key, path), _encode(sub, f"{path}.{key}", depth + 1)] for key, sub in value.items()]]
    else:
        plain = ["l" if isinstance(value, list) else "t", [_encode(sub, path, depth + 1) for sub in value]]
    code = code_of(value, path)
    return plain if code is None else ["k", plain, code, encode_attributes(attributes_of(value), path)]


def _decode(code: Any) -> Any:
    tag, rest = code[0], code[1]
    if tag == "v":
        return decode_plain(rest)
    if tag == "k":
        return as_class(_decode(rest), code[2], code[3])
    if tag == "d":
        return {decode_plain(key): _decode(sub) for key, sub in rest}
    return [_decode(sub) for sub in rest] if tag == "l" else tuple(map(_decode, rest))


def _check_constant(code: Any, depth: int = 0) -> None:
    tag, rest = code[0], code[1]
    if depth > MAX_DEPTH or tag not in ("v", "k", "d", "l", "t"):
        raise ValueError(f"an attribute has the unknown tag {tag!r}")
    if tag == "v":
        check_plain(rest)
    elif tag == "k":
        check(*code[2:])
        _check_constant(rest, depth + 1)
    else:
        for sub in rest:
            if tag == "d":
                check_plain(sub[0])
                hash(decode_plain(sub[0]))
            _check_constant(sub[1] if tag == "d" else sub, depth + 1)
