"""Convert a framework's state with objects that the core cannot save: to tensors and plain values, and one pickle.

A framework's checkpoint consists of nested dicts and lists with tensors, numbers, strings and a few objects of some
class. What the core can save stays as it is, under its name. The objects go into a pickle that a restricted loader
reads, and a mark replaces each of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mlflash.errors import CorruptSlot, StateError
from mlflash.state.plain_values import encode_plain

from . import pickles

_MARK = "object of mlflash.adapters.anything"


def apart(value: Any) -> dict[str, Any]:
    """Make a state for `Checkpointer.save` from nested dicts and lists. Tensors are not copied.

    Not collective. Dicts, lists and tuples are restored as such. A subclass of dict with tensors is restored as a dict.

    Raises:
        StateError: an object cannot be pickled, a load would refuse it (see `pickles.allow`), or a dict looks like the
            mark of an object.
    """
    objects: list[Any] = []
    tree = _without(value, objects, "")
    pickled, tensors = pickles.dump(objects)
    return {"tree": tree, "pickled": pickled, "tensors": tensors}


def together(state: dict[str, Any]) -> Any:
    """Undo `apart`, with the tensors of the state.

    Raises:
        CorruptSlot: `apart` did not make this state, or the pickle names something that may not be loaded.
    """
    try:
        return _with(state["tree"], pickles.load(state["pickled"], state["tensors"]))
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
