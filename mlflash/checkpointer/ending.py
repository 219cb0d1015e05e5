"""How a Checkpointer ends: closed by all ranks, left by an exception, or given up because another rank was lost."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
import traceback
from types import TracebackType

from ..config import Config
from ..draining.drains import Drains
from ..errors import MlflashError
from ..mpi.job_thread import FORKED
from ..protocol.client import Client, one_unit
from ..protocol.messages import Free
from ..protocol.trainer_context import TrainerContext
from ..saving.save_queue import SaveQueue
from . import unclosed

log = logging.getLogger("mlflash")


class Ending:
    """The methods that end a Checkpointer, which makes the parts that they use."""

    _config: Config
    _trainer: TrainerContext
    _courier: Client
    _drains: Drains
    _saves: SaveQueue
    _closed: str  # why calls are refused
    _is_ended: bool

    def _unit(self) -> contextlib.AbstractContextManager[None]:
        return self._courier.unit()

    @one_unit
    def close(self) -> None:
        """Wait for the saves and drains so far, and free windows and communicators; the slots stay in memory.

        Collective over comm. You may call it twice. With ``drain_every`` it first drains the newest checkpoint.

        Raises:
            SaveFailed, DeadlineExceeded: as in :meth:`wait`; or some ranks did not come to the call. The Checkpointer
                is closed in any case.
        """
        if self._closed:
            return
        is_freed = False
        try:
            self._saves.settle()
            if not self._courier.is_stuck:
                self._drains.finish()
            is_freed = not self._courier.is_stuck and self._drains.idle
            if is_freed:
                self._courier.call(Free())
            self._trainer.copy_threads.close()
        finally:  # after an interrupt, too: collective calls are left out then, because other ranks may not make them
            self._end(not is_freed or self._courier.is_stuck, "ended" if sys.exc_info()[0] is None else "failed")
        self._saves.raise_what_failed()

    def _end(self, abandon: bool, state: str) -> None:
        self._is_ended = True
        self._closed = "this Checkpointer was closed"
        with contextlib.ExitStack() as steps:  # they run in reverse order, and each one runs even if another raises
            steps.callback(unclosed.discard, self)
            steps.callback(self._trainer.memory.close)
            steps.callback(self._trainer.slots.close)
            steps.callback(self._saves.end)
            steps.callback(self._courier.stop, abandon)
            steps.callback(self._drains.give_up)
            steps.callback(self._trainer.recorder.end, state)

    def _end_alone(self, state: str, why: str) -> None:
        """End it without any other rank, and say if this leaves out the drain that `close` begins. Not collective."""
        step, config = self._saves.last_step, self._config
        if config.drain_every and self._trainer.ranks.rank == 0 and self._drains.lacks(step):
            log.warning("step %d is in memory only, and not in %s: %s, so close() did not drain it. A relaunch "
                        "restores it from memory, and `mlflash scavenge %s` writes it there",
                        step, config.directory, why, config.directory)  # fmt: skip
        self._end(abandon=True, state=state)

    def interrupt(self, why: str) -> None:
        """Make the next call raise Closed, for example because this run is over. Not collective; any thread."""
        self._closed = self._closed or why

    def abandon(self, timeout_s: float = 10.0) -> bool:
        """Give the Checkpointer up without any other rank. Not collective. What was committed stays.

        Returns:
            Whether nothing copies into its slots any more, so that another Checkpointer may use them.
        """
        if self._is_ended:
            return True
        self._saves.end()
        is_over = self._trainer.slots.wait_until_written(time.monotonic() + timeout_s)
        self._end(abandon=True, state="failed")
        self._trainer.copy_threads.close()
        return is_over

    def _leave(self) -> None:
        """Close it in a forked process: everything belongs to the parent, and continues there. Not collective."""
        self._closed = FORKED
        for leave in (self._courier.leave, self._trainer.recorder.leave, self._saves.end):
            leave()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
                 ) -> None:  # fmt: skip
        """Close it. If an exception is leaving the block, do so without any collective and without waiting."""
        if kind is None:
            self.close()
        elif not self._is_ended:
            if isinstance(error, MlflashError):
                self._trainer.recorder.uncaught("".join(traceback.format_exception(kind, error, trace)))
            self._end_alone("failed", "an exception ended the training")
