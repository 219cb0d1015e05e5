from __future__ import annotations

from collections.abc import Iterator

import pytest

from mlflash.channel import connection


@pytest.fixture(autouse=True, scope="module")
def has_couriers_of_its_own() -> Iterator[None]:
    """Let couriers of a module have its environment, such as the address of its server."""
    yield
    connection.close_all()
