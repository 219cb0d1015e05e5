"""Fixtures of the tests that break things."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import harness
import pytest
from waiting import until


@pytest.fixture(scope="session", autouse=True)
def memories() -> Iterator[None]:
    """Keep what killed jobs leave for the tests that begin with it."""
    with harness.own_memory() as root:
        harness.memories = harness.Memories(root)
        yield
        harness.memories = None


@pytest.fixture(autouse=True)
def no_job_outlives_its_test(shm: Path) -> Iterator[None]:
    yield
    for launch in list(harness.live):
        launch.kill()


@pytest.fixture
def small_memory() -> Iterator[Callable[[int], Path]]:
    """Mount a memory file system of so many bytes; unmounted afterwards."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small tmpfs")
    mounted: list[str] = []

    def mount(nbytes: int) -> Path:
        path = tempfile.mkdtemp(prefix="mlflash-test-", dir="/dev/shm")
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", path], check=True, timeout=30)
        mounted.append(path)
        return Path(path)

    yield mount
    for path in mounted:
        subprocess.run(["umount", "-l", path], check=True, timeout=30)
        os.rmdir(path)


@pytest.fixture(scope="session")
def faulty_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that makes a file system fail, see faulty_files.c."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    library = tmp_path_factory.mktemp("faulty") / "faulty_files.so"
    source = Path(__file__).with_name("faulty_files.c")
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    return library


@pytest.fixture
def small_cgroup() -> Iterator[Callable[[int], Path]]:
    """Make a memory cgroup (v1) with a limit in bytes; removed afterwards."""
    top = Path("/sys/fs/cgroup/memory")
    if os.geteuid() != 0:
        pytest.skip("needs root to make a cgroup")
    if not top.is_dir():
        pytest.skip("there is no memory controller of cgroup v1 here")
    made: list[Path] = []

    def make(nbytes: int) -> Path:
        path = Path(tempfile.mkdtemp(prefix="mlflash-test-", dir=top))
        (path / "memory.limit_in_bytes").write_text(str(nbytes))
        made.append(path)
        return path

    yield make
    for path in made:
        until(lambda path=path: _is_removed(path), f"all processes of {path} to end")


def _is_removed(cgroup: Path) -> bool:
    """Remove a cgroup; False while a process is in it, as the agent of a job may be a moment longer than its ranks."""
    try:
        cgroup.rmdir()
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        return False
    return True
