"""Whose courier a process is, by what /proc says of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlflash.memory.courier_process import parent_and_trainer, works_for


def process(proc: Path, pid: int, parent: int, *words: str) -> None:
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "cmdline").write_bytes(b"\0".join(word.encode() for word in (*words, "")))
    (proc / str(pid) / "stat").write_text(f"{pid} (a (strange) name) S {parent} 0 0")


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A trainer with a zygote and a courier of its own, and one whose zygote a host has started."""
    process(tmp_path, 10, 1, "python", "train.py")
    process(tmp_path, 11, 10, "python", "-m", "mlflash.wireup.zygote", "5", "10", "mpi")
    process(tmp_path, 12, 11, "python", "-m", "mlflash.wireup.zygote", "5", "10", "mpi")
    process(tmp_path, 19, 1, "mlflash", "courier")
    process(tmp_path, 20, 1, "python", "train.py")
    process(tmp_path, 21, 19, "python", "-m", "mlflash.wireup.zygote", "6", "20:7", "mpi")
    process(tmp_path, 22, 21, "python", "-m", "mlflash.wireup.zygote", "6", "20:7", "mpi")
    return tmp_path


def test_a_courier_works_for_its_trainer_whoever_has_started_its_zygote(proc: Path) -> None:
    assert [parent_and_trainer(proc / str(pid)) for pid in (10, 11, 12)] == [None, (10, 10), (11, 10)]
    assert [parent_and_trainer(proc / str(pid)) for pid in (19, 20, 21, 22)] == [None, None, (20, 20), (21, 20)]
    assert [works_for(pid, proc) for pid in (10, 12, 19, 20, 22)] == [10, 10, 19, 20, 20]


def test_one_that_is_left_over_works_for_itself(proc: Path) -> None:
    for trainer in (10, 20):
        for file in (proc / str(trainer)).iterdir():
            file.unlink()
        (proc / str(trainer)).rmdir()
    (proc / "11" / "stat").write_text("11 (python) S 1 0 0")  # taken over by init
    assert [works_for(pid, proc) for pid in (12, 22)] == [12, 22]
    assert parent_and_trainer(proc / "11") == (1, 10) and parent_and_trainer(proc / "21") == (19, 20)


def test_those_of_a_container_know_each_other_by_other_numbers(proc: Path) -> None:
    process(proc, 40, 1, "python", "train.py")
    process(proc, 41, 40, "python", "-m", "mlflash.wireup.zygote", "5", "7", "mpi")
    process(proc, 42, 41, "python", "-m", "mlflash.wireup.zygote", "5", "7", "mpi")
    (proc / "40" / "status").write_text("Name:\tpython\nNSpid:\t40\t7\nThreads:\t1\n")
    assert [parent_and_trainer(proc / str(pid)) for pid in (41, 42)] == [(40, 40), (41, 7)]
    assert [works_for(pid, proc) for pid in (40, 42)] == [40, 40]
    (proc / "41" / "stat").write_text("41 (python) S 1 0 0")
    (proc / "1").mkdir()
    (proc / "1" / "status").write_text("NSpid:\t1\n")
    assert parent_and_trainer(proc / "41") == (1, 7) and works_for(42, proc) == 42


def test_a_process_that_ends_meanwhile_and_a_strange_one_are_none(proc: Path) -> None:
    (proc / "12" / "stat").unlink()
    process(proc, 30, 1, "python", "-m", "mlflash.wireup.zygote")
    process(proc, 31, 1, "python", "-m", "mlflash.wireup.zygote", "5", "no number")
    assert [parent_and_trainer(proc / str(pid)) for pid in (12, 30, 31, 99)] == [None] * 4
    assert works_for(99, proc) == 99
