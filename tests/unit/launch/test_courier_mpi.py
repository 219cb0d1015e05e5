"""Shared memory of MPICH: found by who maps it, removed when nobody does, and nothing else."""

from __future__ import annotations

import mmap
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlflash.launch.courier_mpi import SHARED_MEMORY, mapped_by, remove_unmapped


@pytest.fixture
def name() -> Iterator[str]:
    name = f"mpich_shm_{secrets.token_hex(4)}_0"
    (SHARED_MEMORY / name).write_bytes(bytes(4096))
    yield name
    (SHARED_MEMORY / name).unlink(missing_ok=True)


def test_what_a_process_maps_stays_until_nobody_does(name: str) -> None:
    program = (f"import mmap\nwith open('/dev/shm/{name}', 'r+b') as file: m = mmap.mmap(file.fileno(), 0)\n"
               "print('there'); input()")  # fmt: skip
    with open(SHARED_MEMORY / name, "r+b") as file, mmap.mmap(file.fileno(), 0):
        with subprocess.Popen([sys.executable, "-uc", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            assert other.stdout is not None and other.stdout.readline() == b"there\n"
            assert name in mapped_by("self") and mapped_by(other.pid) == {name}
            assert remove_unmapped({name}) == {name}
            other.communicate(b"\n")
        assert mapped_by(other.pid) == set()
        assert remove_unmapped({name}) == {name}
        assert (SHARED_MEMORY / name).exists()
    assert remove_unmapped({name}) == set()
    assert not (SHARED_MEMORY / name).exists()
    assert remove_unmapped({name}) == set(), "it may be gone already"


def test_nothing_but_a_file_of_ours_is_removed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = SHARED_MEMORY / name
    link = Path(f"{target}0")
    link.symlink_to(target)
    assert remove_unmapped({link.name}) == set() and link.is_symlink() and target.exists()
    link.unlink()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert remove_unmapped({name}) == set() and target.exists()
