"""How ranks find each other without MPI: each way, what else may listen there, and what is said when none fits."""

from __future__ import annotations

import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import PATIENCE_S

from mlflash.errors import UnsafePath, WorldMismatch
from mlflash.wireup.frames import pack
from mlflash.wireup.launcher_variables import Launched
from mlflash.wireup.rendezvous import ask, give, rendezvous, way, who_am_i

TEXT = "10.0.0.1,4000,abcdef"
PRTERUN = {"PMIX_NAMESPACE": "prterun-host-7@1", "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}


def test_who_is_no_rank_of_this_launch_gets_no_text_and_delays_none() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    mine = "1" * 32
    with ThreadPoolExecutor(3) as ranks:
        giver = ranks.submit(give, listener, mine, 3, TEXT, PATIENCE_S)
        strangers = [socket.create_connection(address, PATIENCE_S) for _ in range(70)]  # some are closed for the next
        for sent in (pack("2" * 32), pack([mine]), pack([1, "get", "text"]), b"GET / HTTP"):
            with socket.create_connection(address, PATIENCE_S) as sock:
                sock.sendall(sent)
                try:
                    assert sock.recv(1) == b""
                except ConnectionError:
                    pass
        silent = socket.create_server(("127.0.0.1", 0))
        addresses = [silent.getsockname(), address]
        askers = [ranks.submit(ask, addresses, "here", mine, rank, PATIENCE_S) for rank in (1, 2)]
        assert [asker.result(PATIENCE_S) for asker in askers] == [TEXT, TEXT] and giver.result(PATIENCE_S) is None
    for sock in [*strangers, silent]:
        sock.close()


# A directory


def test_a_directory_of_others_is_refused(tmp_path: Path) -> None:
    me = Launched(0, 3, 0, "prterun")
    (tmp_path / "open").mkdir(0o755)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(UnsafePath, match="nobody else may enter it"):
        rendezvous(PRTERUN, me, TEXT, tmp_path / "open", PATIENCE_S)
    with pytest.raises(UnsafePath, match="cannot be opened as a directory"):
        rendezvous(PRTERUN, me, TEXT, tmp_path / "link", PATIENCE_S)


@pytest.mark.parametrize(
    ("environment", "launcher"),
    [
        ({}, "hydra"),
        ({"PMIX_NAMESPACE": "x", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "prterun"),  # not on one host
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2"}, "srun"),
        ({"MASTER_ADDR": "host"}, "torchrun"),
        ({"PMI_FD": "999", "PMI_RANK": "0", "PMI_SIZE": "3"}, "hydra"),  # which something has closed
    ],
)
def test_where_no_way_fits_it_is_said_what_to_set(environment: dict[str, str], launcher: str, tmp_path: Path) -> None:
    me = Launched(0, 3, None, launcher)
    assert way(environment, me) == ""
    assert way({**environment, "MASTER_ADDR": "host", "MASTER_PORT": "1"}, me) == "MASTER_ADDR and MASTER_PORT"
    assert way(environment, Launched(0, 1, None, launcher)) == "there is one rank"
    with pytest.raises(WorldMismatch, match="set MASTER_ADDR to the name of rank 0's host and MASTER_PORT") as caught:
        rendezvous(environment, Launched(0, 3, None, launcher), TEXT, tmp_path / "private", PATIENCE_S)
    assert ("MASTER_ADDR" in str(caught.value.found)) == ("MASTER_ADDR" not in environment)


# torch.distributed


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    torch = SimpleNamespace(is_initialized=lambda: True, get_rank=lambda: 1, get_world_size=lambda: 3)
    monkeypatch.setitem(sys.modules, "torch.distributed", torch)  # type: ignore[arg-type]
    return torch


def test_a_rank_is_what_torch_distributed_says_where_no_launcher_does(torch: Any) -> None:
    assert who_am_i({}) == Launched(1, 3, None, "torch.distributed")
    assert who_am_i({"RANK": "1", "WORLD_SIZE": "3"}) == Launched(1, 3, None, "torchrun")
    with pytest.raises(WorldMismatch, match=r"rank 0 of 3 \(torchrun\)\n.*rank 1 of 3 \(torch.distributed\)"):
        who_am_i({"RANK": "0", "WORLD_SIZE": "3"})
    torch.is_initialized = lambda: False
    assert who_am_i({}) == Launched(0, 1, 0, "none")
