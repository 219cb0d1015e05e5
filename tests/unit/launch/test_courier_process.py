"""Whose courier a process is, by what /proc says of it."""

from __future__ import annotations

from pathlib import Path

from mlflash.memory.process_names import name_of_courier, trainer_of, works_for

COURIER = name_of_courier(10)


def process(proc: Path, pid: int, name: str, state: str = "S", numbers: str = "", namespace: str = "") -> None:
    (proc / str(pid) / "ns").mkdir(parents=True)
    (proc / str(pid) / "stat").write_text(f"{pid} ({name}) {state} 1 0 0")
    (proc / str(pid) / "status").write_text(f"Name:\t{name}\nNSpid:\t{numbers or pid}\n")
    (proc / str(pid) / "ns" / "pid").symlink_to(f"pid:[{namespace or 1}]")


def test_a_courier_works_for_its_trainer_while_that_runs(tmp_path: Path) -> None:
    process(tmp_path, 10, "a (strange) name")
    process(tmp_path, 12, COURIER)
    assert [works_for(pid, tmp_path) for pid in (10, 12, 99)] == [10, 10, 99]
    (tmp_path / "10" / "stat").write_text("10 (python) Z 1 0 0")  # nobody has asked how it ended
    assert works_for(12, tmp_path) == 12


def test_the_trainer_of_a_container_is_found_by_the_number_that_it_has_there(tmp_path: Path) -> None:
    process(tmp_path, 10, "python")
    process(tmp_path, 40, "python", numbers="40 10", namespace="7")
    process(tmp_path, 41, "python", numbers="41 10", namespace="8")
    process(tmp_path, 42, COURIER, numbers="42 3", namespace="7")
    process(tmp_path, 43, COURIER, numbers="43 4", namespace="9")
    assert [works_for(pid, tmp_path) for pid in (42, 43)] == [40, 43]


def test_other_processes_are_no_couriers(tmp_path: Path) -> None:
    for pid, name in ((30, "courier"), (31, "courier-x"), (32, "mlflash-agent")):
        process(tmp_path, pid, name)
    assert [trainer_of(tmp_path / str(pid)) for pid in (30, 31, 32, 99)] == [None] * 4
