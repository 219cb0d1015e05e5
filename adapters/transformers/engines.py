"""Convert what a Trainer holds to a state for the slots if DeepSpeed trains (ZeRO 1 to 3).

DeepSpeed's engine has the weights, the optimizer and the scaler. It saves and loads them itself.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import transformers.trainer
from accelerate.utils import DeepSpeedSchedulerWrapper
from transformers.trainer import _is_peft_model

from mlflash import Checkpointer
from mlflash.checkpointer.adapter_api import AdapterAPI

from ..deepspeed.files import EngineState, optimizers_of, owned_by, part_of, steps_once_staged
from ..replacing import replaced
from .states import Found, State


class StateOfEngine(State):
    """Everything that a training with DeepSpeed continues from."""

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

    def save(self, adapting: AdapterAPI, step: int) -> None:
        engine = self._trainer.model_wrapped
        self._step.close()
        self._step = steps_once_staged(engine, adapting.wait_staged)
        adapting.save_or_warn(step, self, optimizers_of(engine), functools.partial(owned_by, engine))

    def close(self) -> None:
        self._step.close()

    def state_dict(self) -> dict[str, Any]:
        """Give the live state; no tensor is copied. Collective over all ranks with ZeRO-3."""
        trainer, schedule = self._trainer, self._trainer.lr_scheduler
        return {
            "engine": EngineState(trainer.model_wrapped, exclude_frozen_parameters=_is_peft_model(trainer.model)),
            "scheduler": None if isinstance(schedule, DeepSpeedSchedulerWrapper) else schedule,
            **self._besides(),
        }

    @contextlib.contextmanager
    def loading(self, checkpointer: Checkpointer, found: Found) -> Iterator[None]:
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
