"""What a Trainer holds of a training that DeepSpeed does, ZeRO 1 to 3 ↔ a state for the slots.

The engine has the weights, the optimizer and the scaler, and takes and loads them by itself.
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

from ..deepspeed.files import EngineState, part_of
from ..replacing import replaced
from .states import Found, State


class StateOfEngine(State):
    """All that a training of DeepSpeed goes on from.

    Args:
        trainer: Hugging Face's, which trains.
    """

    whole = "global_step*"

    @property
    def settings(self) -> dict[str, Any]:
        """Of a Checkpointer: that all ranks hold the weights alike, where ZeRO leaves them whole."""
        state = self._trainer.accelerator.state
        if state.num_processes == 1 or state.deepspeed_plugin.zero_stage == 3:
            return {}
        return {"replicated": {part_of("engine", "module"): True}}

    def state_dict(self) -> dict[str, Any]:
        """Take what is in use; no tensor is copied. Collective over all ranks with ZeRO-3.

        Raises:
            StateError: a callback's state, or what it has logged, is nothing that JSON can hold.
            ConfigError: the engine keeps state where it cannot be taken from.
        """
        trainer, schedule = self._trainer, self._trainer.lr_scheduler
        return {
            "engine": EngineState(trainer.model_wrapped, exclude_frozen_parameters=_is_peft_model(trainer.model)),
            "scheduler": None if isinstance(schedule, DeepSpeedSchedulerWrapper) else schedule,
            **self._besides(),
        }

    @contextlib.contextmanager
    def loading(self, checkpointer: Checkpointer, found: Found) -> Iterator[None]:
        """Let the trainer load from memory what it would load from a folder."""
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
