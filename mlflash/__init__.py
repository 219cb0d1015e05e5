"""Memory-first checkpoints for training on HPC clusters: save every few seconds, survive lost nodes.

Importing does nothing: MPI starts, and files are made, when a `Checkpointer` is.
"""

from . import errors
from .checkpointer import Checkpointer
from .rng import rng
from .snapshot import Snapshot
from .version import __version__

__all__ = ["Checkpointer", "Snapshot", "__version__", "errors", "rng"]
