from __future__ import annotations

from collections.abc import Iterator

import pytest

from mlflash.protocol import linked


@pytest.fixture(autouse=True, scope="module")
def has_couriers_of_its_own() -> Iterator[None]:
    """Let couriers of a module have its environment, such as the address of its server."""
    yield
    linked.close_links()
