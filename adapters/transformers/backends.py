"""Choose the state of a Trainer by what trains its model: PyTorch or DeepSpeed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import transformers.trainer
from accelerate.utils import DeepSpeedSchedulerWrapper
from transformers.trainer import _is_peft_model
from transformers.utils import is_sagemaker_mp_enabled

from mlflash import Checkpointer
from mlflash.checkpointer.for_adapters import Adapting
from mlflash.errors import ConfigError

from ..deepspeed import lazy
from ..deepspeed.files import EngineState, part_of
from ..replacing import replaced
from .states import Found, State


def state_of(trainer: Any) -> State:
    """Give the state of a trainer. Its kind depends on what trains the model. Not collective.

    Raises:
        ConfigError: FSDP1, XLA, Megatron-LM or SageMaker trains the model and keeps its own state.
    """
    kind = trainer.accelerator.distributed_type.name
    if getattr(trainer, "is_deepspeed_enabled", False):
        return StateOfEngine(trainer)
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is not None and getattr(plugin, "fsdp_version", 1) != 2:
        raise ConfigError("FSDP1 keeps its state in flat parameters, which this adapter cannot save: set fsdp_config="
                          "{'version': 2}, or for an older Trainer that does not know it the environment variable "
                          "FSDP_VERSION=2", found="fsdp_version 1")  # fmt: skip
    if kind in ("XLA", "MEGATRON_LM") or is_sagemaker_mp_enabled() or getattr(trainer, "is_fsdp_xla_enabled", False):
        raise ConfigError("this backend keeps its own state, and this adapter does not know it", found=kind)
    return State(trainer)


# Convert what a Trainer holds to a state for the slots if DeepSpeed trains (ZeRO 1 to 3). DeepSpeed's engine has the
# weights, the optimizer and the scaler. It saves and loads them itself.


class StateOfEngine(State):
    """Everything that a training with DeepSpeed continues from.

    Args:
        trainer: Hugging Face's Trainer.
    """

    whole = "global_step*"

    def __init__(self, trainer: Any):
        super().__init__(trainer)
        self._step = contextlib.ExitStack()  # holds the replaced step; the optimizer is made when training begins

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of a Checkpointer: all ranks hold the same weights, if ZeRO leaves them whole."""
        state = self._trainer.accelerator.state
        if state.num_processes == 1 or state.deepspeed_plugin.zero_stage == 3:
            return {}
        return {"replicated": {part_of("engine", "module"): True}}

    def save(self, adapting: Adapting, step: int) -> None:
        """Save a step. Collective over all ranks, see `Adapting.save_or_warn`."""
        engine = self._trainer.model_wrapped
        self._step.close()
        self._step = lazy.steps_once_staged(engine, adapting.wait_staged)
        adapting.save_or_warn(step, self, lazy.optimizers_of(engine), functools.partial(lazy.owned_by, engine))

    def close(self) -> None:
        """Give the engine's optimizer its own step back. Not collective."""
        self._step.close()

    def state_dict(self) -> dict[str, Any]:
        """Give the live state; no tensor is copied. Collective over all ranks with ZeRO-3.

        Raises:
            StateError: a callback's state or what it logged cannot be written as JSON.
            ConfigError: the engine keeps state where mlflash cannot save it.
        """
        trainer, schedule = self._trainer, self._trainer.lr_scheduler
        return {
            "engine": EngineState(trainer.model_wrapped, exclude_frozen_parameters=_is_peft_model(trainer.model)),
            "scheduler": None if isinstance(schedule, DeepSpeedSchedulerWrapper) else schedule,
            **self._besides(),
        }

    @contextlib.contextmanager
    def loading(self, checkpointer: Checkpointer, found: Found) -> Iterator[None]:
        """Let the trainer load from memory instead of a folder."""
        self.of_rank.together = functools.partial(checkpointer.adapting.load_together, found.step)

        def load(*args: Any, **kwargs: Any) -> None:
            checkpointer.restore({**self.state_dict(), "trainer": ""}, found.step)

        with (
            replaced(transformers.trainer, deepspeed_load_checkpoint=load),
            replaced(
                self._trainer,
                _load_optimizer_and_scheduler=lambda *args: None,
                _load_scaler=lambda *args: None,
                _load_rng_state=lambda *args: self.of_rank.end_skipping(),
            ),
        ):
            yield
