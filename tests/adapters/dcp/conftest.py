"""Torch jobs of any of the ranks, and Checkpointers on them with a writer and a reader."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from mpi4py import MPI
from processes import free_port
from torch_jobs import job
from waiting import PATIENCE_S

from mlflash import Checkpointer
from mlflash.adapters.dcp import MemoryReader, MemoryWriter

THREAD, PROCESS = dcp.state_dict_saver.AsyncCheckpointerType.THREAD, dcp.state_dict_saver.AsyncCheckpointerType.PROCESS


@pytest.fixture(autouse=True)
def own_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what saves in a process of PyTorch's meet at a port that stays free for the seconds of its imports."""
    monkeypatch.setattr("torch.distributed.checkpoint._async_process_executor.get_free_port", free_port)


@dataclasses.dataclass
class Dcp:
    ckpt: Checkpointer
    writer: MemoryWriter
    reader: MemoryReader
    group: Any

    def save(self, state: dict[str, Any], name: Any, how: str = "sync", planner: Any = None) -> Callable[[], Any]:
        more = {} if name is None else {"checkpoint_id": name}
        if how == "sync":
            metadata = dcp.save(state, storage_writer=self.writer, planner=planner, **more)
            return lambda: metadata
        kind = {"thread": THREAD, "process": PROCESS}[how]
        future = dcp.async_save(state, storage_writer=self.writer, planner=planner, process_group=self.group,
                                async_checkpointer_type=kind, **more)  # fmt: skip
        return lambda: future.result(PATIENCE_S)

    def load(self, state: dict[str, Any], name: Any = None, planner: Any = None) -> dict[str, Any]:
        more = {} if name is None else {"checkpoint_id": name}
        dcp.load(state, storage_reader=self.reader, planner=planner, **more)
        return state


@pytest.fixture
def started(options: dict[str, Any]) -> Callable[..., Any]:
    @contextlib.contextmanager
    def start(comm: MPI.Comm, **more: Any) -> Iterator[Dcp]:
        with warnings.catch_warnings(), Checkpointer(comm=comm, **options | more) as ckpt:
            yield Dcp(ckpt, MemoryWriter(ckpt), MemoryReader(ckpt), dist.new_group(backend="gloo"))

    return start


@pytest.fixture
def torch_job() -> Iterator[MPI.Comm]:
    with job() as comm:
        assert comm is not None
        yield comm


@pytest.fixture
def dcp_job(torch_job: MPI.Comm, started: Callable[..., Any]) -> Iterator[Dcp]:
    with started(torch_job) as running:
        yield running
