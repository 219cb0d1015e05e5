"""Finds couriers and agents among the processes of a node; their names say what they are, and whose."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

AGENT = "mlflash-agent"
"""The name of an agent's process."""
_COURIER = "courier-"
_PROC = Path("/proc")


def name_of_courier(trainer: int) -> str:
    """The name of a courier's process. It has at most 15 characters: the kernel keeps no more."""
    return f"{_COURIER}{trainer}"


def trainer_of(process: Path) -> int | None:
    """The trainer of a courier, by the number that it has there; None: this is no courier, or has ended."""
    try:
        name = read_stat(process).name
    except OSError:
        return None
    number = name.removeprefix(_COURIER)
    return int(number) if number != name and number.isdecimal() else None


def works_for(pid: int, proc: Path = _PROC) -> int:
    """The process that a process works for: a courier works for its trainer, any other or orphaned one for itself."""
    trainer = trainer_of(proc / str(pid))
    if trainer is None:
        return pid
    if _own_number(proc / str(pid)) is None:
        return trainer if _runs(proc / str(trainer)) else pid
    try:  # it is in a container, where its trainer has another number than here
        namespace = (proc / str(pid) / "ns" / "pid").readlink()
        trainers = (process for process in proc.glob("[0-9]*") if _own_number(process) == trainer
                    and (process / "ns" / "pid").readlink() == namespace and _runs(process))  # fmt: skip
        return next((int(process.name) for process in trainers), pid)
    except OSError:
        return pid


def _runs(process: Path) -> bool:
    try:
        return read_stat(process).state not in "ZX"
    except OSError:
        return False


def _own_number(process: Path) -> int | None:
    """The pid of a process in its own pid namespace, if it has another one here; None: it has none, or has ended."""
    try:
        lines = (process / "status").read_text().splitlines()
    except OSError:
        return None
    numbers = next((line.split()[1:] for line in lines if line.startswith("NSpid:")), [])
    return int(numbers[-1]) if len(numbers) > 1 else None


def process_named(pid: int) -> str:
    """Name a process for people; 0 stands for a process whose pid has no meaning here."""
    return f"pid {pid}" if pid else "a process in another container"


class ProcessStat(NamedTuple):
    """What the kernel says of a process."""

    name: str
    # one letter, such as "S" (it waits), "T" (it is stopped) or "Z" (it has ended, and nobody has asked how)
    state: str
    parent: int


def read_stat(process: Path | int) -> ProcessStat:
    """Read the stat of a process, by its pid or its directory in /proc. Raises OSError if it has ended."""
    directory = Path(f"/proc/{process}") if isinstance(process, int) else process
    name, _, rest = (directory / "stat").read_text().partition("(")[2].rpartition(")")
    state, parent = rest.split()[:2]
    return ProcessStat(name, state, int(parent))
