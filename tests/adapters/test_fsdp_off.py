"""SMP's calls where mlflash is off: URLs are written and read as ever, and what would be in memory is nowhere."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch_jobs import job

from mlflash.adapters import fsdp

pytestmark = [
    pytest.mark.mpi(min_size=4),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),  # torch's
]


def test_urls_go_on_and_memory_has_nothing(options: dict[str, Any], root: Path, enabled: bool) -> None:
    with job(), fsdp.Checkpoints(enabled=enabled, **options) as checkpoints:
        assert not checkpoints.enabled
        pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        mine = pairs[dist.get_rank() // 2]
        state = {"weights": torch.full((7,), 1.0 + dist.get_rank() // 2)}
        metadata = checkpoints.async_save(state, "run/step-1/half", mine).result(0)
        assert metadata.state_dict_metadata == {}
        checkpoints.maybe_finalize_async_calls(process_group=mine)
        checkpoints.maybe_finalize_async_calls(blocking=False)
        assert checkpoints.load(state, "run/half", mine) is None
        assert not list(root.glob("node*/*"))
        MPI.COMM_WORLD.Barrier()
        url = f"file://{root}/half{dist.get_rank() // 2}"
        checkpoints.async_save(state, url, mine)
        checkpoints.maybe_finalize_async_calls(process_group=mine)
        MPI.COMM_WORLD.Barrier()
        found = {"weights": torch.zeros(7)}
        assert checkpoints.load(found, url, mine) == 0 and torch.equal(found["weights"], state["weights"])
        names = [thread.name for thread in threading.enumerate() if "mlflash-courier" in thread.name]
        assert not names and not list(root.glob("node*/*"))
        MPI.COMM_WORLD.Barrier()
