"""Exports in formats of others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mlflash.storage.store import open_store
from mlflash.tools.export import whole_of
from mlflash.tools.export_formats import write_dcp


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_loads_what_is_exported_for_it(tmp_path: Path) -> None:
    state: dict[str, Any] = {"a": {"w": torch.arange(6.0).reshape(2, 3)}, "b": torch.ones(4), "lr": 0.1}
    write_dcp(whole_of(state), open_store(tmp_path))
    found: dict[str, Any] = {"a": {"w": torch.zeros(2, 3)}, "b": torch.zeros(4)}
    dcp.load(found, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(found["a"]["w"], state["a"]["w"]) and torch.equal(found["b"], torch.ones(4))
