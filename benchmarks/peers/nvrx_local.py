"""NVRx's local checkpoints with replication: cliques of two ranks on two nodes, saved asynchronously.

Its documentation says that the queue must not be persistent with local checkpoints. It sends replicas by way of "cuda";
where there is no GPU, that is taken to be the CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from interface import Peer, Place, State
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager
from nvidia_resiliency_ext.checkpointing.local.replication.strategies import CliqueReplicationStrategy
from torch.overrides import TorchFunctionMode


class Aware:
    """A list of tensors that can be taken out and put back, which is how it wants a state."""

    def __init__(self, tensors: list[torch.Tensor]):
        self.tensors = tensors
        self.shapes = [tensor.shape for tensor in tensors]

    @property
    def is_hollow(self) -> bool:
        return not self.tensors

    def pop_tensors(self) -> list[torch.Tensor]:
        taken, self.tensors = self.tensors, []
        return taken

    def insert_tensors(self, tensors: Iterable[torch.Tensor]) -> None:
        self.tensors = list(tensors)

    def init_tensors(self) -> None:
        self.tensors = [torch.empty(shape) for shape in self.shapes]

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        """Copy, as from a GPU."""
        self.tensors = [tensor.to("cpu", copy=True) for tensor in self.tensors]

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        """They stay where they are."""


class OnCpu(TorchFunctionMode):
    """What it asks of "cuda" is given by the CPU."""

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = torch.device("cpu")
        if function is torch.Tensor.cuda:
            return args[0]
        return function(*args, **kwargs)


class Library(Peer):
    """A process is forked for each save, which writes own and other file."""

    def __init__(self, place: Place, state: State):
        self._shim = OnCpu() if not torch.cuda.is_available() else None
        if self._shim is not None:
            torch.cuda.synchronize = lambda device=None: None
            torch.cuda.current_device = lambda: torch.device("cpu")
        strategy = CliqueReplicationStrategy.from_replication_params(1, 2)
        self._local = LocalCheckpointManager(place.memory / "nvrx", repl_strategy=strategy)
        self._queue = AsyncCallsQueue(persistent=False)

    def save(self, step: int, state: State) -> None:
        with self._on_cpu():
            request = self._local.save(Aware(list(state.values())), step, is_async=True)
            self._queue.schedule_async_request(request)

    def wait(self) -> None:
        with self._on_cpu():
            self._queue.maybe_finalize_async_calls(blocking=True)

    def load(self, state: State) -> State:
        with self._on_cpu():
            self._local.latest_iteration = -1  # as in a new process, it has to look
            assert self._local.find_latest() > 0
            loaded, _ = self._local.load()
        return dict(zip(state, loaded.tensors, strict=True))

    def close(self) -> None:
        self._queue.close()

    def _on_cpu(self) -> Any:
        return self._shim or contextlib.nullcontext()
