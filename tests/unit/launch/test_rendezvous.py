"""How ranks find each other without MPI: each way, what they know, and what is said when none fits."""

from __future__ import annotations

import datetime
import secrets
import stat
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as distributed
from waiting import PATIENCE_S

from mlflash.errors import DeadlineExceeded, UnsafePath, WorldMismatch
from mlflash.launch.launcher_variables import Launched
from mlflash.launch.rendezvous import TOKEN, meeting_of, ports_of, share_by_store, token_of, who_am_i

TEXT = "10.0.0.1,4000,abcdef"
PRTERUN = {"PMIX_NAMESPACE": "prterun-host-7@1", "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}
SIZE = 4
Store = Callable[[], Any]
PORTS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def share(environment: dict[str, str], me: Launched, text: str | None, directory: Path) -> str:
    how = meeting_of(environment, me, directory, PATIENCE_S).share
    assert how is not None
    return how(text, PATIENCE_S)


def test_ranks_of_one_host_meet_by_a_file_that_only_this_user_can_read(tmp_path: Path) -> None:
    place = tmp_path / "private"
    ranks = [Launched(rank, 3, rank, "prterun") for rank in range(3)]
    with ThreadPoolExecutor(3) as threads:
        askers = [threads.submit(share, PRTERUN, me, None, place) for me in ranks[1:]]
        assert share(PRTERUN, ranks[0], TEXT, place) == TEXT
        assert [asker.result(PATIENCE_S) for asker in askers] == [TEXT, TEXT]
    (file,) = place.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    late = meeting_of({**PRTERUN, "PMIX_NAMESPACE": "another launch"}, ranks[1], place, PATIENCE_S).share
    assert late is not None
    with pytest.raises(DeadlineExceeded, match="for rank 0 to say in"):
        late(None, 0.02)


def test_a_directory_of_others_is_refused(tmp_path: Path) -> None:
    me = Launched(0, 3, 0, "prterun")
    (tmp_path / "open").mkdir(0o755)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(UnsafePath, match="nobody else may enter it"):
        share(PRTERUN, me, TEXT, tmp_path / "open")
    with pytest.raises(UnsafePath, match="cannot be opened as a directory"):
        share(PRTERUN, me, TEXT, tmp_path / "link")


@pytest.mark.parametrize(
    ("environment", "launcher"),
    [
        ({}, "hydra"),
        ({"PMIX_NAMESPACE": "x", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "prterun"),  # not on one host
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2"}, "srun"),
        ({"MASTER_ADDR": "localhost"}, "torchrun"),
        ({"PMI_FD": "999", "PMI_RANK": "0", "PMI_SIZE": "3"}, "hydra"),  # which something has closed
    ],
)
def test_where_no_way_fits_it_is_said_what_to_set(
    environment: dict[str, str], launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    me, place = Launched(0, 3, None, launcher), tmp_path / "private"
    assert meeting_of({**environment, **PORTS}, me, place, PATIENCE_S).how == "MASTER_ADDR and MASTER_PORT"
    assert meeting_of(environment, Launched(0, 1, None, launcher), place, PATIENCE_S).how == "one rank"
    with pytest.raises(WorldMismatch, match="set MASTER_ADDR to the name of rank 0's host and MASTER_PORT") as caught:
        meeting_of(environment, me, place, PATIENCE_S)
    assert ("MASTER_ADDR" in str(caught.value.found)) == ("MASTER_ADDR" not in environment)


# MASTER_PORT, and the secret of a user


def test_all_ranks_of_a_launch_know_ports_and_token_and_no_other_launch_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))

    def ports(rank: int, size: int = 4, port: str = "29500", **more: str) -> Any:
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **more}
        return meeting_of(environment, Launched(rank, size, None, "torchrun"), tmp_path / "private", PATIENCE_S).ports

    mine = ports(0)
    assert mine == ports(3) and mine.ports == list(range(22500, 22516)) and mine.hosts == [""]
    assert mine.places[0] == ("127.0.0.1", 22500)
    others = [ports(0, size=5), ports(0, port="29501"), ports(0, TORCHELASTIC_RUN_ID="x"), ports(0, **{TOKEN: "told"})]
    assert len({mine.token, *(other.token for other in others)}) == 5
    assert ports(1, LOCAL_WORLD_SIZE="4").hosts == ["127.0.0.1", ""], "only this host listens"
    for wrong in ("0", "65536", "-1", "x", ""):
        with pytest.raises(WorldMismatch, match="MASTER_PORT is no port"):
            ports(0, port=wrong)
    assert [ports_of(port)[0] for port in (29500, 8000, 7001, 65535)] == [22500, 8001, 7002, 58535]


def test_a_secret_is_made_once_and_only_its_user_may_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with ThreadPoolExecutor(8) as threads:
        assert len(set(threads.map(lambda _: token_of({}, None, "launch"), range(8)))) == 1
    file = tmp_path / ".config" / "mlflash" / "token"
    assert [*file.parent.iterdir()] == [file] and stat.S_IMODE(file.stat().st_mode) == 0o600
    assert token_of({}, tmp_path / "memory", "launch") != token_of({}, None, "launch"), "each place has its own"
    file.chmod(0o640)
    with pytest.raises(UnsafePath, match="nobody else may read it"):
        token_of({}, None, "launch")
    assert token_of({TOKEN: "told"}, None, "launch") == token_of({TOKEN: "told"}, tmp_path, "launch")
    monkeypatch.setenv("HOME", "/proc/none")
    with pytest.raises(UnsafePath, match="Set MLFLASH_TOKEN to the same text on all ranks"):
        token_of({}, None, "launch")


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


# A store of torch's, whatever earlier launches have left in it


@pytest.fixture(params=["tcp", "file", "hash"])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """Connects to a store as one more rank of it."""
    if request.param == "hash":
        store = distributed.HashStore()
        return lambda: store
    if request.param == "file":
        return lambda: distributed.FileStore(str(tmp_path / "store"), -1)
    server = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    within = datetime.timedelta(seconds=PATIENCE_S)
    return lambda: server and distributed.TCPStore("127.0.0.1", server.port, is_master=False, timeout=within)


def meet(connect: Store, text: str) -> list[str]:
    """Let all ranks come, and give what each gets."""

    def come(rank: int) -> str:
        return share_by_store(distributed, connect(), rank, SIZE, text if rank == 0 else None, PATIENCE_S)

    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(come, range(SIZE)))


def test_all_ranks_get_the_text_of_their_launch(connect: Store) -> None:
    for text in ("10.0.0.1,4000,abc", "fe80::1,4000,def"):
        assert meet(connect, text) == [text] * SIZE


def test_what_ranks_of_earlier_launches_have_left_is_passed_by(connect: Store) -> None:
    """Of one that was killed when it had asked; when it was answered; and of a rank 0 that gave another text."""
    left, dead = distributed.PrefixStore("mlflash", connect()), secrets.token_hex(8)
    for rank in range(1, SIZE):
        left.set(f"ask/{rank}", f"{dead}{rank}")
    left.set(f"answer/{dead}1", "old")
    left.set(f"answer/{dead}2", "old")
    for rank in (2, 3):
        left.set(f"got/{dead}{rank}", "the word of a rank 0 that is dead")
    assert meet(connect, "new") == ["new"] * SIZE
    assert meet(connect, "newer") == ["newer"] * SIZE
