"""NVRx's tests of its local checkpoints: `install` puts `LocalCheckpoints` in the manager's place, as for a user."""

from __future__ import annotations

import contextlib
from typing import Any

from cuda_on_cpu import devices, pretend

from .suite import Suite

SUITE = Suite(
    "nvrx", "NVRx, local checkpoints", "nvidia-resiliency-ext",
    ("tests/checkpointing/unit/test_basic_local.py", "tests/checkpointing/unit/test_cleanup.py"), paths=("src",),
    ranks=2,
)  # fmt: skip


def around() -> contextlib.AbstractContextManager[None]:
    return pretend(devices())


def put_in_place() -> None:
    from mlflash.adapters.megatron import install

    install(timeout_s=60)


def when_collected(items: list[Any]) -> None:
    """Allow the class of their state dicts, as the error text says that a user does."""
    from mlflash.adapters.megatron import allow

    for module in {item.module for item in items}:
        allow(module.SimpleTensorAwareStateDict)
