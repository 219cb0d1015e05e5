"""One exception for each thing a caller can do something about.

Every exception carries what is known of ``rank``, ``node``, ``step``, ``tensor``, ``expected`` and
``found`` as attributes, and says it in its text. docs/errors.md says of each why it comes, and what to do.
"""

from __future__ import annotations

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


class MlflashError(Exception):
    """Any failure that mlflash reports.

    Args:
        message: what went wrong and what to do about it.
        rank: the rank it happened on.
        node: the name of that rank's node.
        step: the training step concerned.
        tensor: the full name (path) of the leaf concerned.
        expected: what should have been there.
        found: what was there.
        ranks: the other ranks concerned (the ones waited for, say).
        nodes: their nodes.
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
        self.agreed = False  # whether all ranks raise it: no rank is in the middle of anything then
        self.follows = False  # whether it may only be what follows from an error on another rank

    def __str__(self) -> str:
        where = []
        if self.rank is not None:
            where.append(f"rank {self.rank}" + (f" on {self.node}" if self.node else ""))
        if self.step is not None:
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
        # Exceptions travel between ranks so that all of them raise the same one: as text, since what was expected
        # and found may be anything, and as one of the classes of this module, since others may not be there.
        kind = next(one.__name__ for one in type(self).__mro__ if one.__module__ == __name__)
        return (_rebuild, (kind, self.message[:_SENT], {name: _sent(field) for name, field in self.__dict__.items()}))


_SENT = 10_000  # characters of a text that other ranks are told


def text_of(error: object) -> str:
    """Give what an exception, or anything else, says of itself, cut where it is long. It raises nothing itself."""
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
    """Another live job on this node uses the same name and so the same memory."""


class UnsafePath(MlflashError, PermissionError):
    """A file or directory belongs to somebody else, is a link, or is open to others."""


class ForeignNode(MlflashError, PermissionError):
    """A rank reached for the memory of another (emulated) node."""


class MemoryTooSmall(MlflashError, MemoryError):
    """The slots do not fit into the memory of the node."""


class StateError(MlflashError, TypeError):
    """The state holds something that cannot be saved; ``tensor`` is its path."""


class StructureMismatch(MlflashError, ValueError):
    """The state given to ``restore`` does not have the shape of the saved one."""


class StepOrderError(MlflashError, ValueError):
    """``save`` was called with a step that is not larger than the one before."""


class StepNotFound(MlflashError, LookupError):
    """The step asked for cannot be restored; the text lists those that can."""


class Unrestorable(MlflashError, RuntimeError):
    """Checkpoints are there, and none of them can be restored; ``reasons`` says of each step why."""

    def __init__(self, message: str, *, reasons: Mapping[int, str] | None = None, **fields: Any):
        super().__init__(message, **fields)
        self.reasons = dict(reasons or {})

    def __str__(self) -> str:
        return super().__str__() + "".join(f"\n  step {step}: {why}" for step, why in sorted(self.reasons.items()))


class WorldSizeChanged(MlflashError, RuntimeError):
    """The checkpoint was saved by another number of ranks."""


class CorruptSlot(MlflashError, ValueError):
    """A slot's bytes are not what its checksums say, or do not follow the format."""


class ReplayMismatch(MlflashError, ArithmeticError):
    """Two ranks have computed different gradients of the same micro-batch: one of them computes wrongly."""


class SaveFailed(MlflashError, RuntimeError):
    """A snapshot will not become a checkpoint; the last committed one is untouched."""


class SuspectState(SaveFailed):
    """A state was not saved, as its values are suspect, and ``on_suspect="raise"`` was asked for."""


class DrainFailed(MlflashError, RuntimeError):
    """A checkpoint did not get into the directory; it is in memory, and those in the directory are untouched."""


class DeadlineExceeded(MlflashError, TimeoutError):
    """A wait took longer than ``timeout_s``; ``ranks`` and ``nodes`` are those waited for."""


class LaunchFailed(MlflashError, RuntimeError):
    """Slurm or mpiexec does not do what `mlflash run` needs of it."""


class Closed(MlflashError, RuntimeError):
    """The Checkpointer was closed already."""
