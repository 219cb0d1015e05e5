"""`keep_alive` without `mlflash run --keep-alive`."""

from __future__ import annotations

from typing import Any

import pytest

import mlflash
from mlflash.errors import ConfigError


def test_without_a_state_a_framework_trains_once() -> None:
    assert mlflash.keep_alive(lambda: 7) == 7


@pytest.mark.parametrize("given", [{"directory": "run8"}, {"job": "run8"}])
def test_settings_without_a_state_are_refused_because_the_adapter_has_them(given: dict[str, Any]) -> None:
    keep_alive: Any = mlflash.keep_alive
    with pytest.raises(ConfigError, match="give these arguments to the adapter"):
        keep_alive(lambda: 7, **given)
