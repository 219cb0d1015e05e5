"""The two packages of Lightning, `lightning` and `pytorch_lightning`: one library, but each has its own classes."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from types import ModuleType

from mlflash.channel import connection
from mlflash.launch.launcher_variables import KEPT
from mlflash.launch.pmi_client import is_refused

_NAMES = ("lightning.pytorch", "pytorch_lightning")


def modules(name: str) -> list[ModuleType]:
    """Import a module, such as ``callbacks``, of each package that the training has imported. Not collective.

    If it has imported neither, import the module of the first package that is installed.
    """
    used = [package for package in _NAMES if package in sys.modules]
    installed = [package for package in _NAMES if importlib.util.find_spec(package.partition(".")[0])]
    return [importlib.import_module(f"{package}.{name}") for package in used or installed[:1] or _NAMES[:1]]


def take_ranks_of_launcher() -> None:
    """Let Lightning have the ranks that the launcher has. Call it before you make a trainer. Not collective.

    It would start MPI to find out whether MPI launched it, while only couriers may use MPI. And if `keep_alive` may
    give this process other ranks, it would compute a rank from that on the node, which a waiting process keeps when it
    takes the rank of another one. In both cases it reads the variables of torchrun.
    """
    for module in modules("trainer.connectors.accelerator_connector"):
        if connection.find() is not None or is_refused():
            module.MPIEnvironment.detect = staticmethod(lambda: False)
        if KEPT in os.environ:
            kind = module.TorchElasticEnvironment
            kind.detect = staticmethod(lambda: True)
            kind.local_rank = lambda self: _place()[1]
            kind.node_rank = lambda self: _place()[0]


def _place() -> tuple[int, int]:
    """The number of the node, and of this process on it, where the process would be that had this rank at first."""
    return divmod(int(os.environ["RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
