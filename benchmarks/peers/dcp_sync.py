"""torch.distributed.checkpoint.save, which stops training, and the code that the two asynchronous variants share.

The state is like that of FSDP2. It consists of DTensors, and each rank holds a shard of each. Plans are cached, as in
PyTorch's own measurements of asynchronous checkpoints. Files are not synced, because memory has no disk behind it.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from interface import Directories, Peer, Place, State
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard


class Library(Peer):
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
