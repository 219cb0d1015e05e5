"""Megatron-LM and Megatron Core: local checkpoints in the memory of the nodes.

    nvrx          the classes that Megatron looks for, NVRx's own or ours
    pickles       what is no tensor ↔ bytes, without running code
    replication   NVRx's replication strategies ↔ redundancy schemes
    local         the manager of local checkpoints

Example:
    checkpointing_context = {"local_checkpoint_manager": LocalCheckpoints("/dev/shm/run42", repl_strategy="xor:8")}
"""

from .local import LocalCheckpoints
from .nvrx import CheckpointingException, work_without_nvrx
from .pickles import allow

__all__ = ["CheckpointingException", "LocalCheckpoints", "allow", "work_without_nvrx"]
