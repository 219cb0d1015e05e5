"""Refuses MPI in a program whose launcher's PMI was used up (`pmi_client`), with an error that says what to do.

MPI_Init would find that the launcher has closed its end, and end the process. So an import of `mpi4py.MPI` that
initializes MPI raises an ImportError, as if there were no MPI. With ``mpi4py.rc.initialize = False`` the import works
for the types, and initializing MPI raises the error. Other ways to MPI_Init, such as a library in C, are not detected.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn

from ..errors import MpiUnavailable

_NAME = "mpi4py.MPI"


class MpiRefused(MpiUnavailable, ImportError):
    """MPI cannot be started in this process any more."""


def refuse_mpi() -> None:
    """Refuse MPI in this process and those that it forks, from now on, unless MPI is up."""
    if not is_refused():
        sys.meta_path.insert(0, _Finder())
    if (module := sys.modules.get(_NAME)) is not None:
        _guard(module)


def is_refused() -> bool:
    """Whether MPI is refused in this process."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def _guard(module: Any) -> None:
    if not module.Is_initialized():
        module.Init = module.Init_thread = _refuse


def _refuse(*_: object) -> NoReturn:
    raise MpiRefused(
        "MPI cannot be started in this process any more: mlflash has used the launcher's PMI connection, which MPI "
        "needs to start, to find the other ranks. If the program uses MPI itself, set courier='thread' or "
        "MLFLASH_COURIER=thread. If it only needs the types of mpi4py, set mpi4py.rc.initialize = False before it "
        "imports mpi4py.MPI"
    )


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _NAME:
            return None
        if sys.modules["mpi4py"].rc.initialize:
            _refuse()
        finders = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(name, path, target) for finder in finders)
        spec = next((one for one in found if one is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any):
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _guard(module)
