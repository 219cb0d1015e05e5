"""Memory-first checkpoints for training on HPC clusters: save every few seconds, survive lost nodes.

Importing this package does nothing else: MPI starts, and files are made, when you make a `Checkpointer`. Modules that
take time to import are imported when you first use them, because the command ``mlflash`` runs at every TAB of a shell.
"""

import importlib
from typing import TYPE_CHECKING, Any

from . import errors
from .rng import rng
from .version import __version__

__all__ = ["Checkpointer", "Snapshot", "__version__", "errors", "keep_alive", "rng"]

if TYPE_CHECKING:
    from .checkpointer.checkpointer import Checkpointer
    from .checkpointer.keep_alive import keep_alive
    from .save.snapshot import Snapshot
else:  # a type checker that sees `__getattr__` would accept any name
    _LATE = {"Checkpointer": "checkpointer.checkpointer", "Snapshot": "save.snapshot",
             "keep_alive": "checkpointer.keep_alive"}  # fmt: skip

    def __getattr__(name: str) -> Any:
        """Import a name when it is first used (PEP 562)."""
        if name not in _LATE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = getattr(importlib.import_module(f".{_LATE[name]}", __name__), name)
        return globals()[name]

    def __dir__() -> list[str]:
        return list(__all__)
