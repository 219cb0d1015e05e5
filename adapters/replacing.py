"""Replace methods and attributes of a framework's objects for a while.

Frameworks lack hooks at some of the places where a checkpoint is saved or loaded.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any

from mlflash.errors import ConfigError

_INHERITED = object()
_number = itertools.count()
_in_place: weakref.WeakValueDictionary[int, _Replacement] = weakref.WeakValueDictionary()
"""Replacements that are not undone yet, by number. It keeps no object of a framework alive."""


def replaced(target: Any, /, **instead: Any) -> contextlib.ExitStack:
    """Give attributes of an object, a class or a module other values until you leave or close the result.

    Not collective, and for one thread at a time. Undoing restores each attribute exactly: as the object's own, or as
    inherited. If another value was set since, that value stays. If that was also done through this function, undoing it
    restores what was there before both. Undoing twice does nothing.

    Args:
        target: the object, class or module.
        instead: the new values by name. They are set by this call.

    Returns:
        A context manager. You may also keep it, and undo later with its `close`.

    Raises:
        ConfigError: the object has no such attribute, because the framework has another version. Nothing is replaced.
    """
    if missing := [name for name in instead if not hasattr(target, name)]:
        name = getattr(target, "__qualname__", getattr(target, "__name__", type(target).__qualname__))
        raise ConfigError("this version of the framework lacks attributes that mlflash replaces: install an older or a "
                          "newer version of it", expected=[f"{name}.{attribute}" for attribute in missing])  # fmt: skip
    with contextlib.ExitStack() as stack:
        for name, new in instead.items():
            stack.callback(_Replacement(target, name, new).undo)
        return stack.pop_all()


def once_staged(wait_staged: Callable[[], None], work: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that waits until saves have copied everything, and then does work that may change weights."""

    @functools.wraps(work)
    def wait_and_work(*args: Any, **kwargs: Any) -> Any:
        wait_staged()
        return work(*args, **kwargs)

    return wait_and_work


class _Replacement:
    def __init__(self, target: Any, name: str, new: Any):
        self._target, self._name, self._new = target, name, new
        self._before = vars(target).get(name, _INHERITED)
        self._number = next(_number)
        setattr(target, name, new)
        _in_place[self._number] = self

    def undo(self) -> None:
        del _in_place[self._number]
        for number, replacement in sorted(_in_place.items()):
            if number > self._number and replacement._is_on(self):
                replacement._before = self._before
                return
        if vars(self._target).get(self._name, _INHERITED) is not self._new:
            return
        if self._before is _INHERITED:
            delattr(self._target, self._name)
        else:
            setattr(self._target, self._name, self._before)

    def _is_on(self, other: _Replacement) -> bool:
        return self._target is other._target and self._name == other._name and self._before is other._new
