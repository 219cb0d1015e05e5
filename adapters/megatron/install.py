"""Let Megatron's own local checkpoints use slots: Megatron finds mlflash's manager where it looks for NVRx's.

Megatron-LM, Megatron Bridge and NeMo make their manager from names of `nvidia_resiliency_ext` when they need it. This
module replaces the values of those names. If NVRx is not installed, it makes modules that have only these names.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import sys
import types
from typing import Any

from . import nvrx
from .local import CkptID, LocalCheckpoints

_LOCAL = "nvidia_resiliency_ext.checkpointing.local"


def install(redundancy: str | None = None, enabled: bool = True, **settings: Any) -> None:
    """Let Megatron's ``--non-persistent-ckpt-type local`` use mlflash. Call it before Megatron's ``pretrain``.

    Not collective. Call it on all ranks with the same arguments. ``--non-persistent-save-interval`` and
    ``--non-persistent-local-ckpt-algo`` work as before. ``--non-persistent-local-ckpt-dir`` names the checkpoints;
    nothing is written there. ``--replication --replication-factor F`` makes F - 1 copies on other nodes, and
    ``--replication-jump`` has no effect.

    Args:
        redundancy: the redundancy scheme, such as "xor:8". It replaces what ``--replication`` asks for.
        enabled: False, or ``MLFLASH_DISABLE=1``: Megatron uses NVRx's own local checkpoints if NVRx is installed, and
            otherwise has none.
        settings: as those of a Checkpointer.

    Example:
        from mlflash.adapters.megatron import install

        install()  # the first lines of pretrain_gpt.py
    """
    if nvrx.stands_aside(enabled):
        return

    class Installed(LocalCheckpoints):
        """The manager that Megatron makes from its flags."""

        def __init__(
            self, root_local_ckpt_dir: str | os.PathLike[str], session_id: str = "", repl_strategy: Any = None
        ):
            strategy = redundancy or repl_strategy
            super().__init__(root_local_ckpt_dir, session_id, strategy, enabled=enabled, **settings)

    for name, values in {
        "base_state_dict": {"TensorAwareStateDict": nvrx.TensorAwareStateDict},
        "ckpt_managers.base_manager": {
            "BaseCheckpointManager": nvrx.BaseCheckpointManager, "CheckpointingException": nvrx.CheckpointingException,
            "CkptID": CkptID, "SameMachineReplicationException": nvrx.SameMachineReplicationException,
        },
        "ckpt_managers.local_manager": {"LocalCheckpointManager": Installed},
        "replication.group_utils": {"GroupWrapper": None, "parse_group_sequence": None},
        "replication.strategies": {
            "CliqueReplicationStrategy": nvrx.Clique, "LazyCliqueReplicationStrategy": nvrx.Clique,
            "NoReplicasAvailableError": nvrx.NoReplicasAvailableError, "ReplicationStrategy": nvrx.ReplicationStrategy,
        },
    }.items():  # fmt: skip
        module = _module(f"{_LOCAL}.{name}")
        for which, value in values.items():
            if value is not None or not hasattr(module, which):
                setattr(module, which, value)
    if "megatron.core.dist_checkpointing.tensor_aware_state_dict" in sys.modules:
        nvrx.work_without_nvrx()


def checkpointing_context(
    local_ckpt_dir: str | os.PathLike[str], session_id: str = "", repl_strategy: Any = None, enabled: bool = True,
    **settings: Any,
) -> dict[str, Any]:  # fmt: skip
    """Make the ``checkpointing_context`` for Megatron's load_checkpoint and save_checkpoint in your own training loop.

    Not collective. The arguments are those of `LocalCheckpoints`.
    """
    manager = LocalCheckpoints(local_ckpt_dir, session_id, repl_strategy, enabled=enabled, **settings)
    nvrx.work_without_nvrx()
    return {"local_checkpoint_manager": manager}


def _module(name: str) -> types.ModuleType:
    """Import a module. If there is none, make an empty one and the packages around it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        made = types.ModuleType(name, "Replaces a module of NVRx, which is not installed.")
        made.__path__ = []
        made.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(_module(parent), own, made)
        sys.modules[name] = made
        return made
