"""Chooses the MPI library of couriers, which need not be that of their trainer.

It is the one that ``MLFLASH_LIBMPI`` names, else that of the Python package mpich of this environment, else the one
that mpi4py finds (``MPI4PY_LIBMPI``, or the usual places). Couriers start without a launcher of MPI, so the library
must speak PMI-1, as MPICH, Cray MPICH and Intel MPI do.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Mapping

LIBRARY = "MLFLASH_LIBMPI"
"""The path of the MPI library of couriers."""
_NAME = "libmpi.so.12"
_NO_PMI = ("Open MPI",)  # names of mpi4py


def choose(environment: Mapping[str, str]) -> str | None:
    """The path of the library; None: mpi4py looks for one."""
    return environment.get(LIBRARY) or _of_package()


def _of_package() -> str | None:
    try:
        files = importlib.metadata.files("mpich") or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    found = (str(file.locate()) for file in files if file.name == _NAME)
    return next((path for path in found if os.path.exists(path)), None)


def needs_launcher(vendor: str) -> bool:
    """Whether an MPI, as mpi4py names it, can be started by its own launcher only."""
    return vendor in _NO_PMI


def describe() -> str:
    """The name, version, devices and path of the library that was loaded. Not collective; MPI need not be up."""
    mpi = sys.modules["mpi4py.MPI"]
    name, version = mpi.get_vendor()
    lines = [line.partition(":") for line in mpi.Get_library_version().splitlines()]
    device = next((value.strip() for key, _, value in lines if key.strip() == "MPICH Device"), "")
    path = os.environ.get("MPI4PY_LIBMPI", "")
    return f"{name} {'.'.join(map(str, version))}" + (f" ({device})" if device else "") + (f", {path}" if path else "")
