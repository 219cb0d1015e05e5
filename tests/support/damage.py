"""Damage to what slots hold."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from mlflash.errors import CorruptSlot
from mlflash.memory.slot import HEADER_NBYTES, Header, Kind, unpack


def headers(folder: Path) -> Iterator[tuple[Path, Header]]:
    for path in sorted(folder.rglob("slot-*")):
        with contextlib.suppress(CorruptSlot):
            yield path, unpack(path.read_bytes()[:HEADER_NBYTES])


def slot(folder: Path, kind: str, rank: int, step: int) -> tuple[Path, Header]:
    """The own slot of a rank with a step, the copy of it on another node, or the parity of a rank."""
    for path, header in headers(folder):
        is_own = f"node{header.rank}" in path.parts
        found = "share" if header.kind is Kind.SHARE else "parity" if header.parities else "own" if is_own else "copy"
        if (found, header.rank, header.step) == (kind, rank, step):
            return path, header
    raise AssertionError(f"there is no {kind} of rank {rank} with step {step}")


def flip(path: Path, *places: int, bit: int = 1) -> None:
    with path.open("r+b") as file:
        for place in places:
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ bit]))


def damage(folder: Path, step: int) -> int:
    """Flip a bit of all that the slots below a folder hold of a step, copies too; gives how many these are."""
    files = [(path, header) for path, header in headers(folder) if header.step == step]
    for path, header in files:
        flip(path, header.extents.payload_start)
    return len(files)
