"""DLRover's flash checkpoint in memory: DdpCheckpointer with a shard per rank, saved with StorageType.MEMORY.

dlrover-run starts the saver of a node before training. Here this module calls the function that the checkpointer would
call by itself, and gives the saver a second to start. Without this second the saver may lose the first request, because
SharedQueue.__init__ of 0.6.1 makes the socket before the queue. The rank would then wait for a minute and fail. Each
rank is a node, so each has its own name for segments. The sockets are in the memory of the run, because DLRover does
not remove them from /tmp.
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
    """Copies the state into a segment while training waits. It does nothing afterward."""

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
        assert self._checkpointer._engine._cached_step == step, "DLRover skipped the save"  # it only logs this

    def load(self, state: State) -> State:
        loaded: State = self._checkpointer.load_checkpoint()
        return loaded

    def close(self) -> None:
        engine = self._checkpointer._engine
        engine.saver_proc.terminate()
        engine.saver_proc.join(10)
        engine._shm_handler.shared_memory.unlink()
