"""Sharing one text by a launcher's PMI-1, against our own server of it."""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from waiting import PATIENCE_S

from mlflash.errors import DeadlineExceeded
from mlflash.wireup.key_value_store import KeyValueStore
from mlflash.wireup.launcher_variables import Launched
from mlflash.wireup.pmi_client import has_pmi, share
from mlflash.wireup.pmi_server import PmiServer
from mlflash.wireup.store_client import StoreClient

SIZE = 3


class Launcher:
    """Serves PMI-1 to three ranks, and closes its end after each one's finalize, as hydra does."""

    def __init__(self) -> None:
        self.store = KeyValueStore()
        self.clients = [StoreClient(self.store.address, self.store.token) for _ in range(SIZE)]
        self.ends = [socket.socketpair() for _ in range(SIZE)]
        self.servers = [PmiServer(self.ends[rank][0], "epoch", rank, [0] * SIZE, self.clients[rank])
                        for rank in range(SIZE)]  # fmt: skip
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._is_over.is_set():
            self.store.step(0.001)
            for server, client in zip(self.servers, self.clients, strict=True):
                client.step()
                if server.fileno() >= 0 and select.select([server], [], [], 0)[0]:
                    server.receive()
                if server.is_finalized:
                    server.close()

    def names(self, rank: int) -> dict[str, str]:
        return {"PMI_RANK": str(rank), "PMI_SIZE": str(SIZE), "PMI_FD": str(self.ends[rank][1].fileno())}

    def share(self, rank: int, text: str | None, timeout_s: float = PATIENCE_S) -> str:
        return share(self.names(rank), Launched(rank, SIZE, rank, "hydra"), text, timeout_s)

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()
        for client in self.clients:
            client.close()
        self.store.close()
        for one, other in self.ends:
            one.close()
            other.close()


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    launcher = Launcher()
    yield launcher
    launcher.close()


def test_all_ranks_get_the_text_once_and_pmi_is_finalised(launcher: Launcher) -> None:
    gave: dict[int, str] = {}

    def run(rank: int) -> None:
        gave[rank] = launcher.share(rank, "10.0.0.1,4000,abc" if rank == 0 else None)

    assert all(has_pmi(launcher.names(rank), Launched(rank, SIZE, rank, "hydra")) for rank in range(SIZE))
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert gave == dict.fromkeys(range(SIZE), "10.0.0.1,4000,abc")
    assert all(server.is_finalized for server in launcher.servers)
    for rank in range(SIZE):
        mine = launcher.ends[rank][1]
        assert mine.getblocking() and select.select([mine], [], [], PATIENCE_S)[0], "its launcher has closed it"
        assert not has_pmi(launcher.names(rank), Launched(rank, SIZE, rank, "hydra"))


def test_a_rank_that_does_not_come_is_waited_for_until_the_deadline(launcher: Launcher) -> None:
    with pytest.raises(DeadlineExceeded, match=r"waited 0\.2 s for all ranks to meet by the PMI of hydra"):
        launcher.share(0, "text", 0.2)


def test_a_pmi_that_somebody_else_uses_or_that_is_not_this_ranks_is_left_alone(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, me = launcher.names(1), Launched(1, SIZE, 1, "hydra")
    assert has_pmi(names, me)
    assert not has_pmi({**names, "PMI_RANK": "2"}, me), "torchrun's workers inherit that of their launcher"
    assert not has_pmi({**names, "PMI_SIZE": "1"}, me)
    assert not has_pmi({**names, "PMI_FD": "http"}, me)
    assert not has_pmi({**names, "PMI_FD": "-1"}, me)
    reading, writing = os.pipe()
    assert not has_pmi({**names, "PMI_FD": str(reading)}, me)
    os.close(reading)
    os.close(writing)
    mpi: Any = ModuleType("mpi4py.MPI")
    mpi.is_up = False
    mpi.Is_initialized = lambda: mpi.is_up
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    assert has_pmi(names, me)
    mpi.is_up = True
    assert not has_pmi(names, me)
