"""Reads the `stat` file of a process or a thread in /proc."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class ProcessStat(NamedTuple):
    """What the kernel says of a process.

    Attributes:
        state: one letter, such as "S" (it waits), "T" (it is stopped) or "Z" (it has ended, and nobody has asked how).
    """

    name: str
    state: str
    parent: int


def read_stat(process: Path | int) -> ProcessStat:
    """Read the stat of a process, by its pid or its directory in /proc. Raises OSError if it has ended."""
    directory = Path(f"/proc/{process}") if isinstance(process, int) else process
    name, _, rest = (directory / "stat").read_text().partition("(")[2].rpartition(")")
    state, parent = rest.split()[:2]
    return ProcessStat(name, state, int(parent))
