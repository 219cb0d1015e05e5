"""The classes of nvidia-resiliency-ext (NVRx) that Megatron, NeMo and Bridge look for.

If NVRx is installed, they are its own. Otherwise this module defines the same names with the same meaning.
"""

from __future__ import annotations

from typing import Any

from mlflash.checkpointer.off import turned_off
from mlflash.errors import ConfigError

try:
    from nvidia_resiliency_ext.checkpointing.local.base_state_dict import TensorAwareStateDict
    from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.base_manager import (
        BaseCheckpointManager,
        CheckpointingException,
        SameMachineReplicationException,
    )
    from nvidia_resiliency_ext.checkpointing.local.replication.strategies import (
        NoReplicasAvailableError,
        ReplicationStrategy,
    )

    HAVE_NVRX = True
except ImportError:
    HAVE_NVRX = False

    class CheckpointingException(Exception):  # type: ignore[no-redef]  # noqa: N818  (NVRx's name)
        """A local checkpoint was not saved, or cannot be loaded."""

    class SameMachineReplicationException(CheckpointingException):  # type: ignore[no-redef]
        """A file existed already. It is never raised, because there are no files."""

        def __init__(self, ckpt_id: object):
            super().__init__(f"Checkpoint '{ckpt_id}' already exists on the same machine.")

    class NoReplicasAvailableError(Exception):  # type: ignore[no-redef]
        """No rank has a copy. Never raised: then `LocalCheckpoints.find_latest` finds an older checkpoint or none."""

    class ReplicationStrategy:  # type: ignore[no-redef]
        """The base class of strategies. A strategy of your own is refused when it is used."""

    class TensorAwareStateDict:  # type: ignore[no-redef]
        """A state dict whose tensors can be taken out and put back."""

    class BaseCheckpointManager:  # type: ignore[no-redef]
        """The base class of managers of local checkpoints."""


def stands_aside(enabled: bool) -> bool:
    """Whether Megatron should use NVRx's own local checkpoints: mlflash is off, and NVRx is installed.

    Without NVRx, Megatron could not even start with local checkpoints. Then it gets a `LocalCheckpoints` that saves
    nothing.
    """
    return turned_off(enabled) and HAVE_NVRX


def work_without_nvrx() -> None:
    """Let Megatron make tensor-aware state dicts even if NVRx, which has their base class, is not installed."""
    from megatron.core.dist_checkpointing import tensor_aware_state_dict

    tensor_aware_state_dict.HAVE_NVRX = True


class Clique:
    """Replaces NVRx's clique replication when Megatron makes one from its flags. It makes no process groups.

    Attributes:
        replication_factor: number of nodes that have each rank's checkpoint.
    """

    def __init__(self, replication_jump: int | None = None, replication_factor: int = 2):
        self.replication_factor = replication_factor

    @classmethod
    def from_replication_params(cls, replication_jump: int | None = None, replication_factor: int = 2) -> Clique:
        """Make a strategy as NVRx does, from ``--replication-jump`` and ``--replication-factor``."""
        return cls(replication_jump, replication_factor)


def scheme_of(strategy: Any) -> str:
    """Give the redundancy scheme that a replication strategy asks for.

    With NVRx, each of the F ranks of a clique holds what all of them have. This survives the loss of F - 1 of them.
    F - 1 copies survive the same, on whatever other nodes they are. NVRx's jump says which ranks are far enough apart.
    mlflash ignores it, because it knows the nodes and uses ``domains``.

    Args:
        strategy: the name of a scheme; None, which means "none"; or NVRx's ``CliqueReplicationStrategy`` or its lazy
            variant.

    Raises:
        ConfigError: the strategy is none of these.
    """
    if strategy is None:
        return "none"
    if isinstance(strategy, str):
        return strategy
    factor = getattr(strategy, "replication_factor", None)
    if factor is None:
        group = getattr(strategy, "local_group", None)
        ranks = getattr(group, "ranks", None)
        factor = None if ranks is None else len(ranks)
    if factor is None:
        raise ConfigError("mlflash does not know this replication strategy", found=type(strategy).__name__,
                          expected='a scheme such as "copy", or a clique replication strategy of NVRx')  # fmt: skip
    return "none" if factor < 2 else f"copy:{factor - 1}"


__all__ = ["HAVE_NVRX", "BaseCheckpointManager", "CheckpointingException", "Clique", "NoReplicasAvailableError",
           "ReplicationStrategy", "SameMachineReplicationException", "TensorAwareStateDict", "scheme_of",
           "stands_aside", "work_without_nvrx"]  # fmt: skip
