"""Managers of local checkpoints for the tests of this folder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mlflash.adapters.megatron import LocalCheckpoints


@pytest.fixture
def start(options: dict[str, Any]) -> Callable[..., contextlib.AbstractContextManager[LocalCheckpoints]]:
    """Give a manager, as a relaunch would have it."""

    @contextlib.contextmanager
    def started(strategy: Any = "copy", **more: Any) -> Iterator[LocalCheckpoints]:
        manager = LocalCheckpoints("/local", "s", strategy, **{**options, **more})
        try:
            yield manager
        except BaseException:
            manager.checkpointer.__exit__(RuntimeError, None, None)
            raise
        manager.close()

    return started
