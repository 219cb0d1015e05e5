"""The result of a collective of gloo, with a wait that can be interrupted, whatever gloo is doing.

If a connection fails while bytes are queued, gloo does not wake the callers that wait to send them
(`Pair::signalException` in gloo/transport/tcp/pair.cc skips unbound buffers in `tx_`). They wait for gloo's timeout,
which is long in training. So a wait here does not wait for gloo, but for a future. Either gloo or an interruption
completes the future.

Source: torchft's managed work, which is also a `torch.distributed.Work` written in Python.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.futures import Future

_FAILED = "failed"


class InterruptibleWork(dist.Work):
    """A running collective, send or receive.

    Args:
        work: gloo's own work.
    """

    def __init__(self, work: dist.Work):
        super().__init__()
        self._work = work
        self._lock = threading.Lock()
        self._ended: Future[Any] | None = None  # completed with a result, or `_FAILED`
        self._future: Future[Any] | None = None  # follows `_ended`, and raises the error
        self._is_over = False
        # Not in a future, which the garbage collector cannot look into: the frames of an error refer to this work.
        self._error: Exception | None = None
        self._why: Exception | None = None

    def interrupt(self, why: Exception) -> None:
        """Make all waits for it, current and later ones, raise an error. Not collective; any thread."""
        with self._lock:
            self._why = self._why or why
        self._end(_FAILED, why)

    def get_future(self) -> Future[Any]:
        """The future of the result."""
        with self._lock:
            is_first = self._future is None
            if self._ended is None or self._future is None:
                self._ended = Future()
                self._future = self._ended.then(self._unwrap)  # C++ sees an error only if a callback raises it
            future, why = self._future, self._why
        if is_first and why is not None:
            self._end(_FAILED, why)
        elif is_first:
            try:
                self._work.get_future().add_done_callback(self._take)
            except RuntimeError:  # sends and receives have no future
                threading.Thread(target=self._wait_for_it, name="mlflash-work", daemon=True).start()
        return future

    def _take(self, theirs: Future[Any]) -> None:
        """Pass on gloo's result, on gloo's thread."""
        try:
            self._end(theirs.value())
        except Exception as error:
            self._end(_FAILED, error)

    def _wait_for_it(self) -> None:
        try:
            self._work.wait()
            self._end(None)
        except Exception as error:
            self._end(_FAILED, error)

    def _end(self, result: Any, error: Exception | None = None) -> None:
        with self._lock:
            if self._ended is None or self._is_over:
                return
            self._is_over, self._error, ended = True, error, self._ended
        ended.set_result(result)

    def _unwrap(self, ended: Future[Any]) -> Any:
        if self._error is not None:
            raise self._error
        return ended.value()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until it has ended. With a timeout, gloo itself waits, which cannot be interrupted.

        Raises:
            RuntimeError: it failed.
            Exception: the error with which it was interrupted.
        """
        if self._why is not None:
            raise self._why
        if timeout:
            return bool(self._work.wait(timeout))
        if self._work.is_completed():
            return bool(self._work.wait())
        self.get_future()
        assert self._ended is not None
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Whether it has ended, with success or not."""
        return self._why is not None or self._is_over or bool(self._work.is_completed())

    def is_success(self) -> bool:
        """Whether it has ended with success."""
        return self._why is None and (self._error is None if self._is_over else bool(self._work.is_success()))

    @property
    def has_memory(self) -> bool:
        """Whether gloo may still write to the tensors."""
        return not self._work.is_completed()

    def result(self) -> Any:
        """Give its result."""
        return self._work.result()

    def source_rank(self) -> int:
        """Give the rank that sent the data, for a receive from any rank."""
        return int(self._work._source_rank())

    _source_rank = source_rank

    def synchronize(self) -> None:
        """Wait until it has ended, because there is no stream that could wait."""
        self.wait()
