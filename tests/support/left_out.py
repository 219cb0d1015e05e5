"""Packages of a framework of which a test needs a part: the rest is left out, with the packages that it would want."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class _Absent(types.ModuleType):
    """A module that is imported from and not used: classes without anything, functions that do nothing."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {}) if name[0].isupper() else lambda *args, **kwargs: None


class _WithoutInit(_Absent):
    """A package of which only those modules are imported that are asked for; names of classes are anybody's."""

    def __getattr__(self, name: str) -> Any:
        if not name[0].isupper():  # a module of it
            raise AttributeError(name)
        return super().__getattr__(name)


def put(name: str, module: types.ModuleType) -> types.ModuleType:
    above, _, last = name.rpartition(".")
    sys.modules[name] = module
    if above in sys.modules:
        setattr(sys.modules[above], last, module)
    return module


def leave_out(*names: str) -> None:
    """Let modules be empty, and whatever is imported from them do nothing."""
    for name in names:
        put(name, _Absent(name))


def leave_init_out(root: str | Path, *names: str) -> None:
    """Let packages be without what their ``__init__`` imports.

    Args:
        root: where the first part of their names is.
        names: in the order in which they are in one another.
    """
    for name in names:
        package = _WithoutInit(name)
        package.__path__ = [str(Path(root, *name.split(".")[1:]))]
        put(name, package)


def found_in(package: str, classes: Sequence[tuple[str, str]]) -> None:
    """Put classes into a package whose ``__init__`` was left out: names, and the module that has each."""
    for name, module in classes:
        setattr(sys.modules[package], name, getattr(importlib.import_module(module), name))
