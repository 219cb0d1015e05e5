"""The classes of nvidia-resiliency-ext (NVRx) that Megatron, NeMo and Bridge look for.

If NVRx is installed, they are its own. Otherwise this module defines the same names with the same meaning.
"""

from __future__ import annotations

from mlflash.checkpointer.disabled import turned_off

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


__all__ = ["HAVE_NVRX", "BaseCheckpointManager", "CheckpointingException", "NoReplicasAvailableError",
           "ReplicationStrategy", "SameMachineReplicationException", "TensorAwareStateDict", "stands_aside",
           "work_without_nvrx"]  # fmt: skip
