"""A zygote of this process: what it refuses to be and to do."""

from __future__ import annotations

import os
import resource
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import needs
import pytest
from waiting import PATIENCE_S, until

from mlflash.wireup.key_value_store import KeyValueStore, listen
from mlflash.wireup.pmi_server import new_epoch_name
from mlflash.wireup.store_client import StoreClient
from mlflash.wireup.zygote_client import ZygoteClient, ZygoteRefused

pytestmark = needs.MPI

# It leaves its shared memory otherwise.


@pytest.fixture
def store() -> Iterator[KeyValueStore]:
    store = KeyValueStore(listen())
    yield store
    store.close()


def start(folder: Path, source: str) -> ZygoteClient:
    """A zygote whose only entry point is the function `run` of a module with this source."""
    (folder / "entry.py").write_text(source)
    paths = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    with open(folder / "output", "w") as output:
        return ZygoteClient(["entry:run"], {**os.environ, "PYTHONPATH": paths}, output)


def fork(zygote: ZygoteClient, store: KeyValueStore) -> int:
    mine, its = socket.socketpair()
    with mine, its:
        return zygote.fork("entry:run", new_epoch_name(1), 0, [0], store.address, store.token, its.fileno(), PATIENCE_S)


def test_couriers_print_where_they_are_told_and_import_nothing_of_the_working_directory(
    tmp_path: Path, store: KeyValueStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sys.version_info >= (3, 11):  # an older Python looks there first
        monkeypatch.chdir(tmp_path)
    (tmp_path / "work").mkdir()
    (tmp_path / "socket.py").write_text("raise AssertionError('of the working directory')")
    source = "import os\ndef run(courier):\n    print('rank', courier.rank, os.environ['PMI_SIZE'], os.getcwd())\n"
    zygote = start(tmp_path / "work", source)
    pid = fork(zygote, store)
    end = zygote.wait(pid, PATIENCE_S)
    assert (end.pid, end.rank, end.status, end.signal) == (pid, 0, 0, None)
    assert (tmp_path / "work" / "output").read_text() == f"rank 0 1 {os.getcwd()}\n"
    zygote.stop(PATIENCE_S)


def test_a_courier_survives_signals_to_a_whole_step_and_ulimit_and_leaves_no_core_file(
    tmp_path: Path, store: KeyValueStore
) -> None:
    source = (
        "import os, resource, signal\n"
        "def run(courier):\n"
        "    print(resource.getrlimit(resource.RLIMIT_CORE)[0], signal.getsignal(signal.SIGXFSZ).name)\n"
        "    for name in ('INT', 'TERM', 'HUP', 'USR1', 'USR2'):\n"
        "        os.kill(os.getpid(), signal.Signals['SIG' + name])\n"
        "        os.kill(os.getppid(), signal.Signals['SIG' + name])\n"
        "    print('commits')\n"
    )
    zygote = start(tmp_path, source)
    end = zygote.wait(fork(zygote, store), PATIENCE_S)
    assert (end.status, end.signal) == (0, None)
    assert (tmp_path / "output").read_text() == "0 SIG_IGN\ncommits\n"
    zygote.stop(PATIENCE_S)
    assert zygote.process.returncode == 0


def test_it_serves_a_store_until_it_ends_for_as_many_ranks_as_it_may_have_files(tmp_path: Path) -> None:
    zygote = start(tmp_path, "run = print\n")
    resource.prlimit(zygote.process.pid, resource.RLIMIT_NOFILE, (100, 417))
    with pytest.raises(ZygoteRefused, match="needs 792 open files, and the hard limit of this host is 417: raise it"):
        zygote.serve("127.0.0.1", 200, PATIENCE_S)
    with pytest.raises(ZygoteRefused, match=r"refused to serve: it could not serve: .*assign requested address"):
        zygote.serve("192.0.2.77", 3, PATIENCE_S)
    address, token = zygote.serve("127.0.0.1", 75, PATIENCE_S)
    assert zygote.serve("127.0.0.1", 75, PATIENCE_S) == (address, token), "the same"
    assert resource.prlimit(zygote.process.pid, resource.RLIMIT_NOFILE) == (417, 417)
    clients = [StoreClient(address, token) for _ in range(3 * 75)]
    for client in clients:
        client.ping(PATIENCE_S)
    clients[0].put("key", "value", PATIENCE_S)
    assert clients[-1].get("key", PATIENCE_S) == "value"
    mine, its = socket.socketpair()
    with mine, its:
        pid = zygote.fork("entry:run", new_epoch_name(1), 0, [0], address, token, its.fileno(), PATIENCE_S)
    assert zygote.wait(pid, PATIENCE_S).status == 0, "a courier holds nothing of the store"
    clients[1].ping(PATIENCE_S)
    zygote.stop(PATIENCE_S)
    until(lambda: clients[0].step() or clients[0].lost is not None, "the store has gone")
    for client in clients:
        client.close()
