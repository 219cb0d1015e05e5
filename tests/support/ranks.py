"""Fixtures of tests that run on every rank of a real mpiexec, and what pytest does otherwise there.

    mpiexec -n 4 python -m pytest --with-mpi tests/mpi/test_views.py

Each rank writes a report of its own, and only the first one prints, unless another one fails. MPI is imported when
pytest has begun, and not with this file: the checkpoint processes of PyTorch must not touch MPI.
"""

from __future__ import annotations

import io
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_blocks import use_small_blocks
from waiting import take

_GIVEN = ("MLFLASH_TEST_", "SLURM_TOPOLOGY_")  # variables that tests give to couriers
_START_S = 90.0
_SAID_S = 3  # launchers lose what was printed right before an abort, and other ranks may still have to say what failed


class OnRanks:
    """A plugin of pytest on each of several ranks."""

    def __init__(self, rank: int, size: int):
        self._rank, self._size = rank, size
        self._printed, self._failed = io.StringIO(), False

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        if self._rank:
            session.config.pluginmanager.get_plugin("terminalreporter")._tw._file = self._printed

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._failed = exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)

    def pytest_unconfigure(self) -> None:
        from mpi4py import MPI

        if self._failed and self._rank:
            print(f"--- rank {self._rank} ---\n{self._printed.getvalue()}", flush=True)
        if self._failed and self._size > 1:
            take(_SAID_S)
            MPI.COMM_WORLD.Abort(1)


def configure(config: pytest.Config) -> None:
    """Prepare pytest on this rank; refuse to run on other ranks than MLFLASH_TEST_RANKS asks for."""
    if not (config.getoption("--with-mpi") or config.getoption("--only-mpi")) or config.option.collectonly:
        return  # pytest-mpi skips what needs MPI, and says which option is missing
    from mpi4py import MPI

    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    wanted = os.environ.get("MLFLASH_TEST_RANKS", str(size))
    if size != int(wanted):
        raise pytest.UsageError(f"MLFLASH_TEST_RANKS asks for {wanted} ranks, and mpiexec started {size}")
    if config.pluginmanager.has_plugin("on_ranks"):  # of another folder
        return
    if config.option.xmlpath:
        path = Path(config.option.xmlpath)
        config.option.xmlpath = str(path.with_name(f"{path.stem}-rank{rank}{path.suffix}"))
    config.pluginmanager.register(OnRanks(rank, size), "on_ranks")


class SharedCouriers:
    """Couriers of all ranks, which all tests use, those on some of the ranks, too."""

    def __init__(self) -> None:
        self._started: dict[str, str] | None = None

    def start(self) -> None:
        """Start them, or start them anew if the environment that tests give them has changed. Collective."""
        from mpi4py import MPI

        from mlflash.channel import connection
        from mlflash.config import from_environment

        given = {name: value for name, value in os.environ.items() if name.startswith(_GIVEN)}
        if MPI.COMM_WORLD.allreduce(given != self._started):
            self.end()
            with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:  # where no test keeps anything
                connection.get(from_environment({}, None, job="t", memory=memory, timeout_s=_START_S), MPI.COMM_WORLD)
            self._started = given

    def end(self) -> None:
        """End them. Collective."""
        from mlflash.channel import connection

        connection.close_all()
        self._started = None


@pytest.fixture(scope="session")
def couriers() -> Iterator[SharedCouriers]:
    """Couriers of all ranks, which are not started yet."""
    made = SharedCouriers()
    yield made
    made.end()


@pytest.fixture
def block_nbytes() -> int:
    return 65_536


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch, block_nbytes: int, couriers: SharedCouriers) -> None:
    """Small blocks in this process and in its couriers."""
    use_small_blocks(monkeypatch, block_nbytes)
    couriers.start()


@pytest.fixture
def comm() -> object:
    from mpi4py import MPI

    MPI.COMM_WORLD.Barrier()
    return MPI.COMM_WORLD


@pytest.fixture
def root(comm: object) -> Iterator[Path]:
    """One directory in /dev/shm for all ranks."""
    yield from _of_all(comm, "/dev/shm")


@pytest.fixture
def tmp_path(comm: object) -> Iterator[Path]:
    """One directory on disk for all ranks, which would make and sweep pytest's own at the same time."""
    yield from _of_all(comm, None)


def _of_all(comm: object, where: str | None) -> Iterator[Path]:
    path = Path(comm.bcast(tempfile.mkdtemp(prefix="mlflash-test-", dir=where) if comm.rank == 0 else None))
    path.mkdir(0o700, exist_ok=True)  # on another host
    yield path
    comm.Barrier()
    if comm.rank == 0:
        shutil.rmtree(path)
    comm.Barrier()
    shutil.rmtree(path, ignore_errors=True)  # on another host, by all that are there


@pytest.fixture
def nodes(root: Path) -> object:
    """The memory of the emulated nodes, under ``root``."""
    from emulated import Nodes

    return Nodes(root)
