"""The ways to send bytes from one rank to another. All check each MiB at both ends while the next chunk is sent."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from exchange import Exchange
from mpi4py import MPI

_BODY = 3
_DEPTH = 4  # number of chunks in flight


def put_and_flush(x: Exchange) -> None:
    """Put and Flush each chunk under one Lock_all. Flush has no deadline."""

    def send(i: int) -> None:
        _put(x, i)
        x.sum(i + 1)
        x.window.Flush(x.peer)

    _each(x, send)


def rput(x: Exchange) -> None:
    """Rput each chunk and test until its bytes have left. They have arrived when their checksums are right."""

    def send(i: int) -> None:
        request = x.window.Rput([x.source[x.chunks[i]], MPI.BYTE], x.peer, _place(x, i))
        x.sum(i + 1)
        x.world.finish(request)

    _each(x, send)
    x.window.Flush(x.peer)


def lock(x: Exchange) -> None:
    """Lock, Put and Unlock for each chunk."""

    def send(i: int) -> None:
        x.window.Lock(x.peer, MPI.LOCK_SHARED)
        _put(x, i)
        x.sum(i + 1)
        x.window.Unlock(x.peer)

    _each(x, send)


def pscw(x: Exchange) -> None:
    """Post, Start, Complete and Wait: each chunk has an epoch of these two ranks only."""

    def send(i: int) -> None:
        x.window.Post(x.group)
        x.window.Start(x.group)
        _put(x, i)
        x.sum(i + 1)
        x.window.Complete()
        x.window.Wait()

    _each(x, send)


def fence(x: Exchange) -> None:
    """Make a fence after each chunk, in which all ranks of the window wait for each other."""

    def send(i: int) -> None:
        _put(x, i)
        x.sum(i + 1)
        x.window.Fence()

    _each(x, send)


def two_sided(x: Exchange) -> None:
    """Isend from the source, and Irecv directly into the file."""
    sent: deque[Any] = deque()
    arriving: deque[Any] = deque()
    x.begin()
    x.sum(0)
    for i, chunk in enumerate(x.chunks):
        arriving.append(x.comm.Irecv([x.inbox[chunk], MPI.BYTE], x.peer, _BODY))
        sent.append(x.comm.Isend([x.source[chunk], MPI.BYTE], x.peer, _BODY))
        x.notify(i)
        x.sum(i + 1)
        if len(sent) == _DEPTH:
            x.world.finish(arriving.popleft(), sent.popleft())
            x.check_one()
    while sent:
        x.world.finish(arriving.popleft(), sent.popleft())
        x.check_one()
    x.end()


WAYS: dict[str, Callable[[Exchange], None]] = {
    "Put + flush": put_and_flush,
    "Rput": rput,
    "Rput, pushed": rput,  # see mlflash.mpi.rma_windows.Poke
    "Put + unlock": lock,
    "PSCW": pscw,
    "fence": fence,
    "Isend + Irecv": two_sided,
}


def _each(x: Exchange, send: Callable[[int], None]) -> None:
    x.begin()
    x.sum(0)
    for i in range(len(x.chunks)):
        send(i)
        x.notify(i)
        x.check_arrived()
    x.end()


def _put(x: Exchange, i: int) -> None:
    x.window.Put([x.source[x.chunks[i]], MPI.BYTE], x.peer, _place(x, i))


def _place(x: Exchange, i: int) -> list[Any]:
    return [x.chunks[i].start, x.chunks[i].stop - x.chunks[i].start, MPI.BYTE]
