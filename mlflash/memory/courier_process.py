"""Finds zygotes and couriers among the processes of a node; their command line says whose they are."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

_ZYGOTE = b"mlflash.wireup.zygote"
_PROC = Path("/proc")


def parent_and_trainer(process: Path) -> tuple[int, int] | None:
    """Return who started a zygote or a courier, and for which trainer; None: it is neither, or has ended.

    A courier has the command line of the zygote that it was forked from. A zygote that a host has started (`mlflash
    courier`) counts as its trainer's child as long as the trainer runs.
    """
    try:
        owner = _told(process)
        if owner is None:
            return None
        trainer, _, is_hosted = owner.partition(":")
        parent = read_stat(process).parent
        if _in_its_namespace(process.parent / str(parent)) == int(trainer):  # it may be in a container of its own
            return parent, parent
        if is_hosted and (process.parent / trainer).exists() and _told(process.parent / str(parent)) is None:
            parent = int(trainer)
        return parent, int(trainer)
    except (OSError, ValueError, IndexError):
        return None


def _in_its_namespace(process: Path) -> int | None:
    """The pid of a process in its own pid namespace, if it has another one here; None: it has none."""
    lines = (process / "status").read_text().splitlines() if (process / "status").exists() else []
    numbers = next((line.split()[1:] for line in lines if line.startswith("NSpid:")), [])
    return int(numbers[-1]) if len(numbers) > 1 else None


def _told(process: Path) -> str | None:
    """Whose zygote or courier a process is, according to its command line; None: it is neither."""
    words = (process / "cmdline").read_bytes().split(b"\0")
    return words[words.index(_ZYGOTE) + 2].decode() if _ZYGOTE in words[:6] else None


def works_for(pid: int, proc: Path = _PROC) -> int:
    """The process that a process works for: a courier works for its trainer, any other or orphaned one for itself."""
    found = parent_and_trainer(proc / str(pid))
    zygote = found and parent_and_trainer(proc / str(found[0]))
    return zygote[1] if zygote and zygote[0] == zygote[1] else pid


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
