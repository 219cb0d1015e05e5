"""The exceptions of mlflash: one for each kind of problem that a caller can act on.

Every exception has the attributes ``rank``, ``node``, ``step``, ``tensor``, ``expected`` and ``found``, as far as they
are known, and its text contains them. docs/errors.md lists, for each exception, its causes and what to do.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, cast

__all__ = [
    "Closed",
    "ConfigError",
    "CorruptSlot",
    "DeadlineExceeded",
    "DrainFailed",
    "ForeignNode",
    "JobInUse",
    "LaunchFailed",
    "MemoryTooSmall",
    "MlflashError",
    "MpiUnavailable",
    "ReplayMismatch",
    "SaveFailed",
    "StateError",
    "StepNotFound",
    "StepOrderError",
    "StructureMismatch",
    "SuspectState",
    "Unrestorable",
    "UnsafePath",
    "WorldMismatch",
    "WorldSizeChanged",
]


def pip_install(*extras: str) -> str:
    """Return the command that installs an extra, or one of several; without one, what mlflash itself needs.

    It names the checkout if mlflash runs there without being installed.

    Example:
        ``pip_install("s3", "sign")`` → ``pip install 'mlflash[s3]' or 'mlflash[sign]'``.
    """
    from importlib import metadata  # rarely needed, and slow to import

    try:
        metadata.distribution("mlflash")
        where = "mlflash"  # an extra of what is installed needs no index that has mlflash
    except metadata.PackageNotFoundError:
        where = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return "pip install " + (" or ".join(f"'{where}[{extra}]'" for extra in extras) or f"'{where}'")


class MlflashError(Exception):
    """Any failure that mlflash reports.

    Args:
        message: what went wrong and what to do about it.
        rank: the rank where it happened.
        node: the name of that rank's node.
        step: the training step.
        tensor: the full name (path) of the leaf.
        expected: what should have been there.
        found: what was there.
        ranks: other ranks that the error is about, such as those that mlflash waited for.
        nodes: the nodes of these ranks.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        node: str | None = None,
        step: int | None = None,
        tensor: str | None = None,
        expected: object = None,
        found: object = None,
        ranks: Sequence[int] = (),
        nodes: Sequence[str] = (),
    ):
        super().__init__(message)
        self.message = message
        self.rank = rank
        self.node = node
        self.step = step
        self.tensor = tensor
        self.expected = expected
        self.found = found
        self.ranks = tuple(ranks)
        self.nodes = tuple(nodes)
        self.agreed = False  # whether all ranks raise it; then no rank is in the middle of anything
        self.follows = False  # whether an error on another rank may be the cause

    def __str__(self) -> str:
        where = []
        if self.rank is not None:
            where.append(f"rank {self.rank}" + (f" on {self.node}" if self.node else ""))
        if self.step is not None and self.step >= 0:  # below: what was given is no step
            where.append(f"step {self.step}")
        if self.tensor is not None:
            where.append(f"at {self.tensor!r}")
        text = self.message + (f" [{', '.join(where)}]" if where else "")
        if self.expected is not None:
            text += f"\n  expected: {self.expected}"
        if self.found is not None:
            text += f"\n  found:    {self.found}"
        return text

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions travel between ranks so that all of them raise the same one. The fields travel as text, because
        # they may hold anything. The class becomes one of this module, because other ranks may not have another one.
        kind = next(base.__name__ for base in type(self).__mro__ if base.__module__ == __name__)
        return (_rebuild, (kind, self.message[:_SENT], {name: _sent(field) for name, field in self.__dict__.items()}))


_SENT = 10_000  # most characters of a text that is sent to other ranks


def text_of(error: object) -> str:
    """Return the text of an exception, or of anything else, cut if it is long. Raises nothing itself."""
    try:
        text = f"{type(error).__name__}: {error}" if isinstance(error, BaseException) else repr(error)
    except Exception:
        text = f"<{type(error).__module__}.{type(error).__qualname__}, which cannot be shown>"
    return text if len(text) <= _SENT else text[:_SENT] + "..."


def _sent(field: object) -> object:
    if field is None or type(field) in (bool, int, float):
        return field
    if type(field) is str:
        return field[:_SENT]
    if type(field) in (tuple, list):
        return tuple(_sent(item) for item in cast("Sequence[object]", field))
    if type(field) is dict:
        return {_sent(key): _sent(item) for key, item in field.items()}
    return text_of(field)


def _rebuild(kind: str, message: str, fields: dict[str, object]) -> MlflashError:
    made: MlflashError = globals()[kind](message)
    made.__dict__.update(fields)
    return made


class ConfigError(MlflashError, ValueError):
    """A setting is missing or makes no sense."""


class MpiUnavailable(MlflashError, RuntimeError):
    """The process was started by an MPI launcher, but mpi4py or the MPI library cannot be loaded."""


class WorldMismatch(MlflashError, RuntimeError):
    """MPI and the launcher, or MPI and torch.distributed, disagree about ranks."""


class JobInUse(MlflashError, RuntimeError):
    """Another live job on this node uses the same name, and so the same memory."""


class UnsafePath(MlflashError, PermissionError):
    """A file or directory belongs to somebody else, is a link, or is open to others."""


class ForeignNode(MlflashError, PermissionError):
    """A rank tried to open the memory of another node."""


class MemoryTooSmall(MlflashError, MemoryError):
    """The slots do not fit into the memory of the node."""


class StateError(MlflashError, TypeError):
    """The state contains something that cannot be saved; ``tensor`` is its path."""


class StructureMismatch(MlflashError, ValueError):
    """The state given to ``restore`` does not match the saved one."""


class StepOrderError(MlflashError, ValueError):
    """``save`` was called with a step that is not larger than the one before."""


class StepNotFound(MlflashError, LookupError):
    """The step that you asked for cannot be restored; the text lists those that can."""


class Unrestorable(MlflashError, RuntimeError):
    """There are checkpoints, but none of them can be restored; ``reasons`` says why for each step."""

    def __init__(self, message: str, *, reasons: Mapping[int, str] | None = None, **fields: Any):
        super().__init__(message, **fields)
        self.reasons = dict(reasons or {})

    def __str__(self) -> str:
        return super().__str__() + "".join(f"\n  step {step}: {why}" for step, why in sorted(self.reasons.items()))


class WorldSizeChanged(MlflashError, RuntimeError):
    """Another number of ranks saved the checkpoint."""


class CorruptSlot(MlflashError, ValueError):
    """The bytes of a slot or file do not match their checksums, or do not follow the format."""


class ReplayMismatch(MlflashError, ArithmeticError):
    """Two ranks computed different gradients from the same micro-batch: one of them computes wrong results."""


class SaveFailed(MlflashError, RuntimeError):
    """A snapshot will not become a checkpoint; the last committed one is untouched."""


class SuspectState(SaveFailed):
    """A state was not saved because its values are suspect, and you set ``on_suspect="raise"``."""


class DrainFailed(MlflashError, RuntimeError):
    """A checkpoint was not written to the directory; it is still in memory, and older ones there are untouched."""


class DeadlineExceeded(MlflashError, TimeoutError):
    """An operation took longer than ``timeout_s``; ``ranks`` and ``nodes`` are those that mlflash waited for."""


class LaunchFailed(MlflashError, RuntimeError):
    """Slurm, mpiexec or another launcher does not do what `mlflash run` needs."""


class Closed(MlflashError, RuntimeError):
    """The Checkpointer has ended or has stopped working."""
