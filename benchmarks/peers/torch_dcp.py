"""torch.distributed.checkpoint: save, which stops training, and async_save with a thread and with a process.

The state is like that of FSDP2. It consists of DTensors, and each rank holds a shard of each. Plans are cached, as in
PyTorch's own measurements of asynchronous checkpoints. Files are not synced, because memory has no disk behind it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from interface import Directories, Peer, Place, State
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard


class Sync(Peer):
    """Writes a directory for each step. The user deletes the previous one."""

    def __init__(self, place: Place, state: State):
        mesh = init_device_mesh("cpu", (place.comm.size,))
        self._model = {"model": {name: DTensor.from_local(value, mesh, [Shard(0)], run_check=False)
                                 for name, value in state.items()}}  # fmt: skip
        self._group = dist.new_group(backend="gloo")  # an asynchronous save communicates at the same time as training
        self._directories = Directories(place, "dcp")

    def save(self, step: int, state: State) -> None:
        dcp.save(self._model, **self._arguments(step))

    def load(self, state: State) -> None:
        dcp.load(self._model, storage_reader=dcp.FileSystemReader(self._directories.newest), process_group=self._group)

    def tidy(self) -> None:
        self._directories.tidy()

    def _arguments(self, step: int) -> dict[str, Any]:
        return {
            "storage_writer": dcp.FileSystemWriter(self._directories.add(step), sync_files=False),
            "planner": dcp.DefaultSavePlanner(enable_plan_caching=True),
            "process_group": self._group,
        }


class Thread(Sync):
    """Uses one stager for all saves. The options that need CUDA are on if this machine has CUDA."""

    kind = AsyncCheckpointerType.THREAD

    def __init__(self, place: Place, state: State):
        super().__init__(place, state)
        cuda = torch.cuda.is_available()
        shared = self.kind is AsyncCheckpointerType.PROCESS
        self._stager = DefaultStager(StagingOptions(use_pinned_memory=cuda, use_shared_memory=shared,
                                                    use_async_staging=False, use_non_blocking_copy=cuda))  # fmt: skip
        self._future: Any = None

    def save(self, step: int, state: State) -> None:
        self._future = dcp.async_save(self._model, async_checkpointer_type=self.kind, async_stager=self._stager,
                                      **self._arguments(step))  # fmt: skip

    def wait(self) -> None:
        self._future.result()

    def close(self) -> None:
        self._stager.close()


class Process(Thread):
    """The same as the variant with a thread. The first save starts the process, and later saves use it again."""

    kind = AsyncCheckpointerType.PROCESS
