"""DLRover's flash checkpoint in memory: DdpCheckpointer with a shard per rank, saved with StorageType.MEMORY.

dlrover-run would start the saver of a node; where it has not, the checkpointer starts one, in a process of its own. Each
rank is a node, so each has its own name for sockets and segments.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from interface import Peer, Place, State

SOCKETS = Path("/tmp/ckpt_sock")  # as DLRover has it, fixed


class Library(Peer):
    """The state is copied into a segment while training waits, and that is all."""

    replicas = 0

    def __init__(self, place: Place, state: State):
        self._run = f"mlflash-{place.comm.bcast(os.getpid())}-node{place.rank}"
        node, nodes = str(place.rank), str(place.comm.size)
        os.environ |= {
            "TORCHELASTIC_RUN_ID": self._run, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": node,
            "GROUP_WORLD_SIZE": nodes, "NODE_RANK": node, "NODE_NUM": nodes, "DLROVER_LOG_LEVEL": "ERROR",
        }  # fmt: skip
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType

        self._memory = StorageType.MEMORY
        self._checkpointer = DdpCheckpointer(
            str(place.memory / "dlrover"), local_shard_num=1, global_shard_num=place.comm.size,
            replica_count=self.replicas,
        )  # fmt: skip

    def save(self, step: int, state: State) -> None:
        self._checkpointer.save_checkpoint(step, dict(state), storage_type=self._memory)
        assert self._checkpointer._engine._cached_step == step, "skipped"  # which it only logs

    def load(self, state: State) -> State:
        loaded: State = self._checkpointer.load_checkpoint()
        return loaded

    def close(self) -> None:
        engine = self._checkpointer._engine
        engine.saver_proc.terminate()
        engine.saver_proc.join(10)
        engine._shm_handler.shared_memory.unlink()
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(SOCKETS / self._run)
