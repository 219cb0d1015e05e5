"""Tests of tests/mpi on ranks that torchrun has started: ``rank_of_torchrun.py ARGUMENTS OF PYTEST``.

These tests call MPI, which torchrun does not start: a process beside each rank answers what MPI asks there, by the
servers that couriers start with. The Checkpointers of the tests know nothing of it: they have torchrun's variables.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from datetime import timedelta
from typing import NoReturn

import pytest
from waiting import PATIENCE_S

from mlflash.wireup.key_value_store import KeyValueStore
from mlflash.wireup.own_address import own_address
from mlflash.wireup.pmi_server import PmiServer, new_epoch_name
from mlflash.wireup.store_client import StoreClient

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def answer(trainer: socket.socket, mpi: socket.socket, pidfd: int) -> NoReturn:
    """Be the process beside a rank, until that has ended; that of rank 0 has the store, until nobody needs it."""
    store = KeyValueStore(own_address(False, os.environ)) if RANK == 0 else None
    with trainer.makefile("rw") as lines:
        if store is not None:
            print(json.dumps([store.address, store.token]), file=lines, flush=True)
        (address, token), epoch, nodes = json.loads(lines.readline())
    client = StoreClient(tuple(address), token)
    server = PmiServer(mpi, epoch, RANK, nodes, client)
    until = None
    while until is None or (store is not None and store.connections > 1 and time.monotonic() < until):
        poll, acts = select.poll(), {}
        if until is None:
            poll.register(pidfd, select.POLLIN)
        watched = [(server, select.POLLIN, server.receive), (client, client.events, client.step)]
        if store is not None:
            watched.append((store, select.POLLIN, store.step))
        for one, events, act in watched:
            if one.fileno() >= 0 and events:
                poll.register(one.fileno(), events)
                acts[one.fileno()] = act
        for fd, _ in poll.poll(1000):
            if fd == pidfd:
                until = time.monotonic() + PATIENCE_S
            else:
                acts[fd]()
        if server.error is not None:
            print(f"rank {RANK}: {server.error}", file=sys.stderr)
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    os._exit(0)


def start_mpi() -> None:
    """Start MPI in this process, whose rank and size are torchrun's."""
    trainer, its = socket.socketpair()
    mpi, servers = socket.socketpair()
    pidfd = os.pidfd_open(os.getpid())
    if os.fork() == 0:
        trainer.close()
        mpi.close()
        answer(its, servers, pidfd)
    its.close()
    servers.close()
    from torch.distributed import TCPStore

    torchrun = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), SIZE, is_master=False,
                        timeout=timedelta(seconds=PATIENCE_S))  # fmt: skip
    with trainer, trainer.makefile("rw") as lines:
        if RANK == 0:
            torchrun.set("tests/store", json.dumps([*json.loads(lines.readline()), new_epoch_name(1)]))
        torchrun.set(f"tests/{RANK}", socket.gethostname())
        hosts = [torchrun.get(f"tests/{rank}").decode() for rank in range(SIZE)]
        address, token, epoch = json.loads(torchrun.get("tests/store"))
        print(json.dumps([[address, token], epoch, [hosts.index(host) for host in hosts]]), file=lines, flush=True)
    os.environ.update(PMI_FD=str(mpi.fileno()), PMI_RANK=str(RANK), PMI_SIZE=str(SIZE))
    from mpi4py import MPI

    assert (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size) == (RANK, SIZE)
    for name in ("PMI_FD", "PMI_RANK", "PMI_SIZE"):
        del os.environ[name]
    mpi.detach()  # MPI's from now on


if __name__ == "__main__":
    start_mpi()
    sys.exit(pytest.main(sys.argv[1:]))
