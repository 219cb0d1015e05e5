"""Transformers' tests of its Trainer's checkpoints: each Trainer that they make saves in memory, too."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

from .suite import Suite

_TESTS = ("tests/trainer/test_trainer_checkpointing.py", "tests/trainer/test_trainer_jit_checkpoint.py",
          "tests/trainer/test_trainer.py", "-k", "(checkpoint or resum or save or best_model or JIT) and not "
          "gradient_checkpointing and not push_to_hub")  # fmt: skip
SUITE = Suite("trainer", "Transformers, Trainer", "transformers", _TESTS, package="transformers",
              variables={"HF_HUB_OFFLINE": "1"})  # fmt: skip


def around() -> contextlib.AbstractContextManager[None]:
    """Nothing: they run on CPUs. What is installed is imported before their conftest puts the checkout's own first."""
    import transformers.testing_utils  # noqa: F401

    return contextlib.nullcontext()


def put_in_place(**settings: Any) -> None:
    """Let each Trainer that is made have our callback."""
    from transformers import Trainer

    from mlflash.adapters.transformers import TrainerWrapper

    make = Trainer.__init__

    @functools.wraps(make)
    def made(trainer: Any, *args: Any, **kwargs: Any) -> None:
        make(trainer, *args, **kwargs)
        TrainerWrapper(trainer, timeout_s=60, **settings)

    Trainer.__init__ = made
