"""torch.distributed.checkpoint.async_save that writes in a thread, with a stager that keeps its memory."""

from __future__ import annotations

from typing import Any

import dcp_sync
import torch
import torch.distributed.checkpoint as dcp
from interface import Place, State
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType


class Library(dcp_sync.Library):
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
