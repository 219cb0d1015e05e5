"""NVRx's local checkpoints with replication: cliques of two ranks on two nodes, saved asynchronously.

According to its documentation the queue must not be persistent with local checkpoints. NVRx sends replicas through
"cuda". Without a GPU the CPU is used instead.
"""

from __future__ import annotations

from bench.nvrx import Aware, on_cpu
from interface import Peer, Place, State
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager
from nvidia_resiliency_ext.checkpointing.local.replication.strategies import CliqueReplicationStrategy


class Library(Peer):
    """Forks a process for each save. It writes the file of this rank and that of the other rank."""

    def __init__(self, place: Place, state: State):
        strategy = CliqueReplicationStrategy.from_replication_params(1, 2)
        self._local = LocalCheckpointManager(place.memory / "nvrx", repl_strategy=strategy)
        self._queue = AsyncCallsQueue(persistent=False)

    def save(self, step: int, state: State) -> None:
        with on_cpu():
            request = self._local.save(Aware(list(state.values())), step, is_async=True)
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
