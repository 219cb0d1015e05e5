"""Lightning is one library under two names, with classes of its own under each: `lightning` and `pytorch_lightning`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

from mlflash.courier import linked
from mlflash.wireup.mpi_refused import is_refused

_NAMES = ("lightning.pytorch", "pytorch_lightning")


def modules(name: str) -> list[ModuleType]:
    """Import a module, such as ``callbacks``, under each name that the training uses. Not collective.

    Where it uses none so far, the first one that is installed.

    Raises:
        ModuleNotFoundError: neither is.
    """
    used = [package for package in _NAMES if package in sys.modules]
    installed = [package for package in _NAMES if importlib.util.find_spec(package.partition(".")[0])]
    return [importlib.import_module(f"{package}.{name}") for package in used or installed[:1] or _NAMES[:1]]


def leave_mpi_alone() -> None:
    """Keep Lightning from starting MPI to see whether that has launched it, where it is the couriers'. Not collective.

    It goes by the environment then, as under torchrun. Call it before a trainer is made.
    """
    if linked.is_linked() or is_refused():
        for module in modules("trainer.connectors.accelerator_connector"):
            module.MPIEnvironment.detect = staticmethod(lambda: False)
