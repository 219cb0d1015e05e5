"""What a collective of gloo returns, so that a wait for it can be ended, whatever gloo is doing.

gloo does not wake what waits to send when a connection fails while the bytes are queued (`Pair::signalException` in
gloo/transport/tcp/pair.cc passes by what `tx_` holds of unbound buffers): it waits for its timeout, which training has
long. So nobody waits for gloo itself here, but for a future that is completed by gloo, or by who interrupts it.

Source: torchft's managed work, which is a `torch.distributed.Work` of Python in the same way.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.futures import Future

_FAILED = "failed"


class InterruptibleWork(dist.Work):
    """A collective, a send or a receive on its way.

    Args:
        work: gloo's.
    """

    def __init__(self, work: dist.Work):
        super().__init__()
        self._work = work
        self._lock = threading.Lock()
        self._ended: Future[Any] | None = None  # with a result, or `_FAILED`
        self._future: Future[Any] | None = None  # follows it, and raises the error
        self._is_over = False
        # Not in a future: the collector of garbage cannot see into these, and an error has frames that have this work.
        self._error: Exception | None = None
        self._why: Exception | None = None

    def interrupt(self, why: Exception) -> None:
        """End what waits for it, and have all raise that will. Not collective; any thread."""
        with self._lock:
            self._why = self._why or why
        self._end(_FAILED, why)

    def get_future(self) -> Future[Any]:
        """The future of the result."""
        with self._lock:
            is_first = self._future is None
            if self._ended is None or self._future is None:
                self._ended = Future()
                self._future = self._ended.then(self._unwrap)  # in C++ only what a callback raises is an error
            future, why = self._future, self._why
        if is_first and why is not None:
            self._end(_FAILED, why)
        elif is_first:
            try:
                self._work.get_future().add_done_callback(self._take)
            except RuntimeError:  # sends and receives have none
                threading.Thread(target=self._wait_for_it, name="mlflash-work", daemon=True).start()
        return future

    def _take(self, theirs: Future[Any]) -> None:
        """Pass on what gloo says; on its thread."""
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
        """Wait for it. With a timeout it is gloo that waits, and cannot be interrupted.

        Raises:
            RuntimeError: it has failed.
            Exception: that it was interrupted with.
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
        """Whether it has ended, well or not."""
        return self._why is not None or self._is_over or bool(self._work.is_completed())

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self._why is None and (self._error is None if self._is_over else bool(self._work.is_success()))

    @property
    def has_memory(self) -> bool:
        """Whether gloo may still write to the tensors."""
        return not self._work.is_completed()

    def result(self) -> Any:
        """What it has brought."""
        return self._work.result()

    def source_rank(self) -> int:
        """The rank that has sent what a receive from any rank has got."""
        return int(self._work._source_rank())

    _source_rank = source_rank

    def synchronize(self) -> None:
        """Wait for it: there is no stream that could."""
        self.wait()
