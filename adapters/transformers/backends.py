"""Choose the state of a Trainer by what trains its model: PyTorch or DeepSpeed."""

from __future__ import annotations

from typing import Any

from transformers.utils import is_sagemaker_mp_enabled

from mlflash.errors import ConfigError

from .states import State


def state_of(trainer: Any) -> State:
    """Give the state of a trainer. Its kind depends on what trains the model. Not collective.

    Raises:
        ConfigError: FSDP1, XLA, Megatron-LM or SageMaker trains the model and keeps its own state.
    """
    kind = trainer.accelerator.distributed_type.name
    if getattr(trainer, "is_deepspeed_enabled", False):
        from .engines import StateOfEngine  # imports DeepSpeed

        return StateOfEngine(trainer)
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is not None and getattr(plugin, "fsdp_version", 1) != 2:
        raise ConfigError("FSDP1 keeps its state in flat parameters, which this adapter cannot save: set fsdp_config="
                          "{'version': 2}, or for an older Trainer that does not know it the environment variable "
                          "FSDP_VERSION=2", found="fsdp_version 1")  # fmt: skip
    if kind in ("XLA", "MEGATRON_LM") or is_sagemaker_mp_enabled() or getattr(trainer, "is_fsdp_xla_enabled", False):
        raise ConfigError("this backend keeps its own state, and this adapter does not know it", found=kind)
    return State(trainer)
