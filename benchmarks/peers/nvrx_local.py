"""NVRx's local checkpoints with replication: cliques of two ranks on two nodes, saved asynchronously.

According to its documentation the queue must not be persistent with local checkpoints. NVRx sends replicas through
"cuda". Without a GPU the CPU is used instead. NVRx has wheels for Python 3.12 only, but its local checkpoints are plain
Python, so you can unpack the wheel:

    pip download --no-deps --python-version 3.12 --only-binary :all: --platform manylinux_2_39_x86_64 \
        nvidia-resiliency-ext==0.7.0
    python -m zipfile -e nvidia_resiliency_ext-0.7.0-*.whl nvrx
    pip install --target nvrx --no-deps defusedxml==0.7.1
    export PYTHONPATH=$PWD/nvrx
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from bench.tensor_aware import TensorAware
from interface import Peer, Place, State
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager
from nvidia_resiliency_ext.checkpointing.local.replication.strategies import CliqueReplicationStrategy
from torch.overrides import TorchFunctionMode


class _OnCpu(TorchFunctionMode):
    """Uses the CPU instead of "cuda", through which NVRx sends replicas."""

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = torch.device("cpu")
        if function is torch.Tensor.cuda:
            return args[0]
        return function(*args, **kwargs)


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Let NVRx work without a GPU. If there is a GPU, change nothing."""
    if torch.cuda.is_available():
        yield
        return
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.current_device = lambda: torch.device("cpu")
    with _OnCpu():
        yield


class Library(Peer):
    """Forks a process for each save. It writes the file of this rank and that of the other rank."""

    def __init__(self, place: Place, state: State):
        strategy = CliqueReplicationStrategy.from_replication_params(1, 2)
        self._local = LocalCheckpointManager(place.memory / "nvrx", repl_strategy=strategy)
        self._queue = AsyncCallsQueue(persistent=False)

    def save(self, step: int, state: State) -> None:
        with on_cpu():
            request = self._local.save(TensorAware(list(state.values())), step, is_async=True)
            self._queue.schedule_async_request(request)

    def wait(self) -> None:
        with on_cpu():
            self._queue.maybe_finalize_async_calls(blocking=True)

    def load(self, state: State) -> State:
        with on_cpu():
            self._local.latest_iteration = -1  # as in a new process, so that it looks for the newest
            assert self._local.find_latest() > 0
            loaded, _ = self._local.load()
        return dict(zip(state, loaded.tensors, strict=True))

    def close(self) -> None:
        self._queue.close()
