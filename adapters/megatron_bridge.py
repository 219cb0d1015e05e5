"""Megatron Bridge: its checkpoint manager, with local checkpoints in the memory of the nodes.

Only the manager of local checkpoints is mlflash's. Bridge still decides what a checkpoint contains and when it saves
which kind. It writes persistent checkpoints itself, and loads the newer of the two kinds (the local one if both are
equally new).

Example:
    from mlflash.adapters import megatron_bridge

    cfg.checkpoint.non_persistent_ckpt_type = "local"
    cfg.checkpoint.non_persistent_save_interval = 50
    cfg.checkpoint.non_persistent_local_ckpt_dir = "run42"  # a name: nothing is written there
    megatron_bridge.use(cfg.checkpoint, redundancy="copy")
    pretrain(cfg, forward_step)
"""

from __future__ import annotations

import logging
from typing import Any

from megatron.bridge.training.checkpointing import DefaultCheckpointManager
from megatron.bridge.utils import instantiate_utils

from .megatron import checkpointing_context
from .megatron.nvrx import Clique, stands_aside

log = logging.getLogger("mlflash")

_settings: dict[str, Any] = {}


class MemoryCheckpointManager(DefaultCheckpointManager):
    """The class for ``checkpoint.custom_manager_class`` of Megatron Bridge 0.4 and newer. `use` sets it.

    Args:
        checkpoint_config: Bridge's configuration. ``non_persistent_local_ckpt_dir`` names the checkpoints.
            ``replication`` with ``replication_factor`` F makes F - 1 copies on other nodes, unless you gave `use`
            another ``redundancy``.
    """

    def __init__(self, checkpoint_config: Any):
        if checkpoint_config.non_persistent_ckpt_type != "local" or stands_aside(_settings.get("enabled", True)):
            super().__init__(checkpoint_config)
            return
        self.checkpoint_config = checkpoint_config
        _let_warnings_through()
        factor = checkpoint_config.replication_factor if checkpoint_config.replication else 1
        settings = {"repl_strategy": Clique(replication_factor=factor), **_settings}
        self._context = checkpointing_context(checkpoint_config.non_persistent_local_ckpt_dir, **settings)
        manager = self._context["local_checkpoint_manager"]
        manager.persistent_dir = getattr(checkpoint_config, "load", None)
        manager.persistent_save = getattr(checkpoint_config, "save", None)


def use(checkpoint_config: Any, redundancy: str | None = None, enabled: bool = True, **settings: Any) -> None:
    """Let Bridge's local checkpoints (``non_persistent_ckpt_type="local"``) use mlflash.

    Not collective. Call it on all ranks with the same arguments, before Bridge's ``pretrain`` or ``finetune``.

    Args:
        checkpoint_config: ``cfg.checkpoint``.
        redundancy: the redundancy scheme, such as "xor:8". Default: what ``replication`` of the configuration says.
        enabled: False, or ``MLFLASH_DISABLE=1``: Bridge uses NVRx's own local checkpoints if NVRx is installed, and
            otherwise has none.
        settings: as those of a Checkpointer.
    """
    _settings.clear()
    _settings.update(settings, enabled=enabled)
    if stands_aside(enabled):
        return
    if redundancy is not None:
        _settings["repl_strategy"] = redundancy
    checkpoint_config.custom_manager_class = f"{__name__}.{MemoryCheckpointManager.__name__}"
    if hasattr(instantiate_utils, "register_allowed_target_prefix"):  # from Bridge 0.5 on, and needed from 0.6 on
        instantiate_utils.register_allowed_target_prefix("mlflash.adapters.")


def _let_warnings_through() -> None:
    """Take back that Bridge, by default, drops the warnings of all loggers: those of mlflash say what may be lost."""
    for added in [known for known in log.filters if getattr(known, "__name__", "") == "warning_filter"]:
        log.removeFilter(added)
