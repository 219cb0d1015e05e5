"""A save behind the training, as the queues of Megatron and NVRx take it.

A queue gives a function to a process of its own, the worker, and calls the finalizing functions when it has returned on
all ranks. Here the worker has nothing to do but to wait until the save has ended: a FIFO tells it.
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
    """Something to be done behind the training, and what to do when all ranks have done it.

    A queue makes a request of its own class of it, which its worker insists on: NVRx's or Megatron's, as it has not as
    many fields as those.

    Attributes:
        async_fn: what is to be done elsewhere.
        async_fn_args, async_fn_kwargs: its arguments.
        finalize_fns: called one after the other by the training, when all ranks are through.
    """

    async_fn: Callable[..., Any]
    async_fn_args: tuple[Any, ...]
    finalize_fns: list[Callable[[], Any]]
    async_fn_kwargs: dict[str, Any]

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        """Add a function to be called at the end."""
        self.finalize_fns.append(fn)

    def execute_sync(self) -> None:
        """Do all of it now. Collective over the ranks of torch.distributed."""
        self.async_fn(*self.async_fn_args, **self.async_fn_kwargs)
        torch.distributed.barrier()
        for finalize in self.finalize_fns:
            finalize()


def request(
    add_done_callback: Callable[[Callable[[Any], None]], Any], finalize: Callable[[], None], timeout_s: float
) -> AsyncRequest:
    """Make the request of a save that goes on by itself.

    Args:
        add_done_callback: called with what is to be called when it has ended, whatever came of it.
        finalize: waits for it, and raises what went wrong.
        timeout_s: how long a worker waits before it lets ``finalize`` say what is the matter.
    """
    path = os.path.join(tempfile.gettempdir(), f"mlflash-save-{uuid.uuid4().hex}")
    os.mkfifo(path, 0o600)
    fifo = os.open(path, os.O_RDWR | os.O_NONBLOCK)

    def tell(_: Any) -> None:
        os.write(fifo, b".")  # also where children of this process have it open, too
        os.unlink(path)
        os.close(fifo)

    add_done_callback(tell)
    return AsyncRequest(wait_for, (path, timeout_s), [finalize], {})


def nothing_to_do() -> AsyncRequest:
    """Make the request of a save that is none."""
    return AsyncRequest(wait_for, ("", 0.0), [], {})


def wait_for(path: str, timeout_s: float) -> None:
    """Wait, in any process of this machine, for the end of a save, or of the process that saves.

    Args:
        path: of the FIFO, which is gone when the save has ended.
        timeout_s: returns after so many seconds in any case.
    """
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
