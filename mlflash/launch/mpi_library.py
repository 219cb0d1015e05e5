"""Chooses the MPI library of couriers, which need not be that of their trainer.

It is the one that ``MLFLASH_LIBMPI`` names, else that of the Python package mpich of this environment, else the one
that mpi4py finds (``MPI4PY_LIBMPI``, or the usual places). Couriers start without a launcher of MPI, so the library
must speak PMI-1, as MPICH, Cray MPICH and Intel MPI do.
"""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Mapping

LIBRARY = "MLFLASH_LIBMPI"
"""The path of the MPI library of couriers."""
FOUND = "MPI4PY_LIBMPI"
"""The path that mpi4py loads; the agent notes there what it has chosen."""
_NAME = "libmpi.so.12"
_NO_PMI = ("Open MPI",)  # names of mpi4py


def choose(environment: Mapping[str, str]) -> str | None:
    """The path of the library; None: mpi4py looks for one."""
    return environment.get(LIBRARY) or _of_package()


def _of_package() -> str | None:
    # Where its wheel puts it. The standard library's importlib.metadata would take 2 MB in each courier.
    has_it = [folder for folder in sys.path if folder and glob.glob(f"{glob.escape(folder)}/mpich-*.dist-info")]
    found = (os.path.normpath(os.path.join(folder, "..", "..", _NAME)) for folder in has_it)
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
    path = os.environ.get(FOUND, "")
    return f"{name} {'.'.join(map(str, version))}" + (f" ({device})" if device else "") + (f", {path}" if path else "")
