"""DLRover's flash checkpoint in memory: DdpCheckpointer with a shard per rank, saved with StorageType.MEMORY.

dlrover-run starts the saver of a node before training. Here the saver is started by the function that the checkpointer
would call by itself, and gets a second to start. Otherwise its queue may accept a request before it can answer
(SharedQueue.__init__ of 0.6.1 makes the socket, then the queue) and lose it, and the rank would wait for a minute and
fail. Each rank is a node, so each has its own name for segments. Sockets are put into the memory of the run, because
nothing removes those in /tmp.
"""

from __future__ import annotations

import os
import time

from dlrover.python.common import multi_process
from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType
from dlrover.trainer.torch.flash_checkpoint.engine import CheckpointEngine, start_saver_process
from interface import Peer, Place, State

SAVER_S = 1.0


class Library(Peer):
    """The state is copied into a segment while training waits, and that is all."""

    replicas = 0

    def __init__(self, place: Place, state: State):
        multi_process.SOCKET_TMP_DIR = f"{place.memory}/node{place.rank}/"
        node, nodes = str(place.rank), str(place.comm.size)
        os.environ |= {
            "TORCHELASTIC_RUN_ID": f"run-{place.rank}", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": node,
            "GROUP_WORLD_SIZE": nodes, "NODE_RANK": node, "NODE_NUM": nodes,
        }  # fmt: skip
        CheckpointEngine.saver_proc = start_saver_process()
        time.sleep(SAVER_S)
        self._checkpointer = DdpCheckpointer(
            str(place.memory / "dlrover"), local_shard_num=1, global_shard_num=place.comm.size,
            replica_count=self.replicas,
        )  # fmt: skip

    def save(self, step: int, state: State) -> None:
        self._checkpointer.save_checkpoint(step, dict(state), storage_type=StorageType.MEMORY)
        assert self._checkpointer._engine._cached_step == step, "skipped"  # which it only logs

    def load(self, state: State) -> State:
        loaded: State = self._checkpointer.load_checkpoint()
        return loaded

    def close(self) -> None:
        engine = self._checkpointer._engine
        engine.saver_proc.terminate()
        engine.saver_proc.join(10)
        engine._shm_handler.shared_memory.unlink()
