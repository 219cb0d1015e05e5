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

from mlflash.wireup.mpich_segments import (
    SHARED_MEMORY,
    SegmentRecord,
    is_segment,
    mapped_by,
    named_after,
    remove_unmapped,
)


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


def test_what_a_killed_zygote_has_left_is_removed_by_the_next_one(tmp_path: Path, name: str) -> None:
    directory = tmp_path / "mine"
    killed, lives = SegmentRecord(directory), SegmentRecord(directory)
    killed.add({name, "mpich_shm_0_0"})
    lives.add({name})
    os.close(killed._fd)  # as at the end of its process
    with open(SHARED_MEMORY / name, "r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
    SegmentRecord(directory).close()
    assert (SHARED_MEMORY / name).exists(), "another zygote may have a courier that maps it"
    lives.close()
    SegmentRecord(directory).close()
    assert (SHARED_MEMORY / name).exists() and [*directory.iterdir()], "somebody maps it"
    mapped.close()
    SegmentRecord(directory).close()
    assert not (SHARED_MEMORY / name).exists() and not [*directory.iterdir()]


def test_names_follow_from_the_epoch_as_in_mpich() -> None:
    assert "mpich_shm_2a5e72b0_3" in named_after("kvs_probe", 3), "seen with MPICH 5.0.2"
    assert "mpich_vci_8595b9a2_0" in named_after("kvs_probe", 0), "kvs_probe-1, in MPICH 5.1"
    assert all(map(is_segment, named_after("kvs_probe", 4000)))
