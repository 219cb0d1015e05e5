"""Checkpoints that are written to memory and moved to disk: all of their files or none, whoever ends when."""

from __future__ import annotations

import contextlib
import os
import signal
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from waiting import until

from mlflash import Checkpointer
from mlflash.framework_files.background_files import BackgroundFiles, leftovers


class Ranks:
    """The files of some ranks, which write to one disk."""

    def __init__(self, folder: Path, size: int, run: str = "r", patience_s: float = 30.0, rate: float = 0.0):
        self.memory, self.disk = folder / "memory", folder / "disk"
        self.memory.mkdir(exist_ok=True)
        self.disk.mkdir(exist_ok=True)
        self.ranks = [
            BackgroundFiles(str(self.memory), "job", run, rank, size, rate, patience_s) for rank in range(size)
        ]

    def write(self, rank: int, step: int) -> None:
        """Write what a rank has of a step."""
        notes = {str(self.disk / "latest"): f"step-{step}"} if rank == 0 else {}
        with self.ranks[rank].directory(self.disk / f"step-{step}", notes) as path:
            (path / "inner").mkdir()
            (path / "inner" / f"rank-{rank}").write_bytes(bytes([rank]) * 100_000)
            if rank == 0:
                (path / "config.json").write_text("{}")

    def found(self) -> dict[str, int]:
        """The files on disk, and their sizes; of those that are renamed just now any may be missing."""
        sizes = {}
        for folder, _, names in os.walk(self.disk):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    sizes[str(Path(folder, name).relative_to(self.disk))] = os.stat(Path(folder, name)).st_size
        return sizes

    def left_in_memory(self) -> list[Path]:
        return [Path(folder, name) for folder, _, names in os.walk(self.memory) for name in names]

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
            rank._listener.join(60)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path, 2)
    yield ranks
    ranks.close()


WHOLE = {"step-1/config.json": 2, "step-1/inner/rank-0": 100_000, "step-1/inner/rank-1": 100_000, "latest": 6}


def test_nothing_has_the_name_before_the_files_of_all_ranks_are_there(two: Ranks) -> None:
    assert two.ranks[0].has_room()
    two.write(0, 1)
    until(lambda: [*two.disk.glob(".r.*.part/.mlflash-files-0")], "the files of rank 0")
    assert not [*two.disk.glob("*step*")], "nobody takes it for a checkpoint by its name"
    assert not two.ranks[0].wait(0)
    assert not (two.disk / "step-1").exists() and not (two.disk / "latest").exists()
    two.write(1, 1)
    assert all(rank.wait(60) and rank.failures() == {} for rank in two.ranks)
    assert two.found() == WHOLE and two.left_in_memory() == []
    assert (two.disk / "step-1/inner/rank-1").read_bytes() == b"\1" * 100_000


def test_a_rank_that_does_not_come_is_a_failure_and_leaves_nothing(tmp_path: Path) -> None:
    two = Ranks(tmp_path, 2, patience_s=0.3)
    two.write(0, 1)
    assert two.ranks[0].wait(60)
    assert "did not come within 0.3 s" in two.ranks[0].failures()[str(two.disk / "step-1")]
    assert two.found() == {} and two.ranks[0].failures() == {}
    two.close()


def test_what_is_written_before_a_trainer_is_killed_comes_to_disk(tmp_path: Path) -> None:
    two = Ranks(tmp_path, 2, rate=400_000.0)  # a quarter of a second each
    two.write(0, 1)
    two.write(1, 1)
    for rank in two.ranks:  # as the kernel does
        rank.close()
    until(lambda: two.found() == WHOLE, lambda: str(two.found()))
    until(lambda: not two.left_in_memory(), "memory to be free")


def test_where_the_disk_fails_the_others_hear_of_it(two: Ranks, tmp_path: Path) -> None:
    (two.disk / "no").write_text("a file")
    for rank in two.ranks:
        with rank.directory(two.disk / "no" / "step-1") as path:
            (path / "x").write_text("x")
    for rank in two.ranks:
        assert rank.wait(60) and "Not a directory" in str(rank.failures())
    assert two.left_in_memory() == []


def test_where_writing_raises_nothing_is_moved(two: Ranks) -> None:
    with pytest.raises(ZeroDivisionError), two.ranks[0].directory(two.disk / "step-1") as path:
        (path / "x").write_text("x")
        raise ZeroDivisionError
    assert two.ranks[0].wait(0) and two.left_in_memory() == [] and two.found() == {}


def test_a_link_comes_after_what_it_leads_to_and_replaces_what_had_its_name(two: Ranks) -> None:
    (two.disk / "last").mkdir()
    for step in (1, 2):
        two.write(1, step)
        two.write(0, step)
        two.ranks[0].link(two.disk / "last", two.disk / f"step-{step}")
        assert two.ranks[0].wait(60) and two.ranks[0].failures() == {}
        assert (two.disk / "last").readlink() == Path(f"step-{step}")
    two.ranks[0].link(two.disk / "last", two.disk / "step-3")
    assert two.ranks[0].wait(60) and two.ranks[0].failures() == {str(two.disk / "last"): "step-3 is not there"}
    assert (two.disk / "last").readlink() == Path("step-2") and not [*two.disk.glob("*.part")]


def test_a_mover_that_is_killed_is_a_failure_and_files_go_to_disk_directly(two: Ranks, tmp_path: Path) -> None:
    first = two.ranks[0]
    two.write(0, 1)
    os.kill(first._process.pid, signal.SIGKILL)
    assert first.wait(60) and "ended with -9" in str(first.failures())
    assert not first.has_room()
    first.link(two.disk / "last", two.disk / "step-1")
    assert first.wait(60) and "has ended" in str(first.failures())
    nbytes = sum(path.stat().st_size for path in two.left_in_memory())
    assert nbytes == 100_002, "nobody has moved it"
    assert leftovers(str(two.memory), "job", dry_run=True) == nbytes and leftovers(str(two.memory), "other") == 0
    later = Ranks(tmp_path, 1, run="later")
    assert not two.left_in_memory(), "a leftover of a run that is over"
    later.close()
    two.close()
    assert leftovers(str(two.memory), "job") == 0 and not list(two.memory.iterdir())


def test_a_step_that_is_there_already_stays(two: Ranks) -> None:
    (two.disk / "step-1").mkdir()
    (two.disk / "step-1" / "whole").write_text("yes")
    two.write(0, 1)
    two.write(1, 1)
    assert two.ranks[0].wait(60) and two.ranks[0].failures() == {}
    assert two.found() == {"step-1/whole": 3, "latest": 6}


@pytest.mark.parametrize("makes_checksums", [True, False])
def test_files_of_torch_are_what_torch_would_have_written(shm: Path, makes_checksums: bool) -> None:
    """Their checksums are made on the way; a file may have several archives, and others only look like one."""
    state = {"a": torch.randn(1000), "none": torch.zeros(0), "b": [1, torch.ones(3, 3)], "text": "x"}
    of_torch, before = torch.serialization, torch.serialization.get_crc32_options()
    others = {"empty": b"", "short": b"PK", "torn": b"PK\5\6" + bytes(18), "odd": bytes(60) + b"PK\5\6" + b"\xff" * 18}

    def write(folder: Path) -> None:
        torch.save(state, folder / "state.pt")
        with (folder / "several.distcp").open("wb") as file:
            for value in (torch.ones(5), state, 7):
                torch.save(value, file)
        for name, content in others.items():
            (folder / name).write_bytes(content)

    of_torch.set_crc32_options(makes_checksums)
    try:
        with Checkpointer(job="j", memory=str(shm)) as checkpointer:
            files = checkpointer.adapting.own_files()
            with files.directory(shm / "disk") as path:
                write(path)
            files.finish()
            files.close()
        (shm / "disk2").mkdir()
        write(shm / "disk2")
    finally:
        of_torch.set_crc32_options(before)
    names = sorted(path.name for path in (shm / "disk").iterdir())
    assert names == sorted([*others, "several.distcp", "state.pt"])
    for name in names:
        assert (shm / "disk" / name).read_bytes() == (shm / "disk2" / name).read_bytes(), name
    with zipfile.ZipFile(shm / "disk" / "state.pt") as archive:
        assert (archive.testzip() is None) == makes_checksums
