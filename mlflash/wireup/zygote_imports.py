"""What a zygote imports before it forks: an import after a fork would cost time in each epoch."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable

from .courier_process import Courier

Entry = Callable[[Courier], object]


def import_all(entries: list[str], with_mpi: bool) -> dict[str, Entry]:
    """Import everything that couriers will need; return their entry points by name.

    Raises:
        RuntimeError: an import has initialized MPI or imported torch.
    """
    import numpy  # noqa: F401

    initialised: Callable[[], bool] = lambda: False
    if with_mpi:
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI

        initialised = MPI.Is_initialized

    found = {}
    for entry in entries:
        module, _, function = entry.partition(":")
        found[entry] = getattr(importlib.import_module(module), function)
    if initialised() or "torch" in sys.modules:
        raise RuntimeError(f"importing {', '.join(entries)} has initialized MPI or imported torch")
    return found


def vendor() -> str:
    """The MPI implementation that was loaded, as mpi4py names it. Not collective; MPI need not be initialized."""
    name: str = sys.modules["mpi4py.MPI"].get_vendor()[0]
    return name
