"""A save in the background, as the queues of Megatron and NVRx take it.

A queue gives a function to a process of its own, the worker, and calls the finalizing functions when the function has
returned on all ranks. Here the worker only waits until the save has ended, which it learns from a FIFO.
"""

from __future__ import annotations

import os
import select
import tempfile
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class AsyncRequest(NamedTuple):
    """Work to do in the background, and what to do when all ranks have done it.

    It has fewer fields than the request classes of NVRx and Megatron. Because of that, a queue converts it to its own
    class, which its worker needs.

    Attributes:
        async_fn: the function that the worker calls.
        async_fn_args, async_fn_kwargs: its arguments.
        finalize_fns: functions that the training calls one after the other when all ranks are done.
    """

    async_fn: Callable[..., Any]
    async_fn_args: tuple[Any, ...]
    finalize_fns: list[Callable[[], Any]]
    async_fn_kwargs: dict[str, Any]

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        self.finalize_fns.append(fn)

    def execute_sync(self) -> None:
        """Do all of the work now. Collective over the ranks of torch.distributed."""
        self.async_fn(*self.async_fn_args, **self.async_fn_kwargs)
        torch.distributed.barrier()
        for finalize in self.finalize_fns:
            finalize()


def request(
    add_done_callback: Callable[[Callable[[Any], None]], Any], finalize: Callable[[], Any], timeout_s: float
) -> AsyncRequest:
    """Make the request of a save that runs by itself.

    Args:
        add_done_callback: takes a function to call when the save has ended, successful or not.
        finalize: waits for the save, and raises its error.
        timeout_s: how long the worker waits at most. Then ``finalize`` reports the problem.
    """
    path = os.path.join(tempfile.gettempdir(), f"mlflash-save-{uuid.uuid4().hex}")
    os.mkfifo(path, 0o600)
    fifo = os.open(path, os.O_RDWR | os.O_NONBLOCK)

    def tell(_: Any) -> None:
        os.write(fifo, b".")  # so that it works even if child processes have it open
        os.unlink(path)
        os.close(fifo)

    add_done_callback(tell)
    return AsyncRequest(wait_for, (path, timeout_s), [finalize], {})


def nothing_to_do() -> AsyncRequest:
    """Make a request without any work."""
    return AsyncRequest(wait_for, ("", 0.0), [], {})


def wait_for(path: str, timeout_s: float) -> None:
    """Wait, in any process of this machine, for the end of a save or of the process that saves."""
    try:
        fifo = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return
    try:
        poll = select.poll()
        poll.register(fifo, select.POLLIN)
        poll.poll(1000 * timeout_s)
    finally:
        os.close(fifo)
