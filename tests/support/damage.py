"""Damage to what slots hold, while no job runs."""

from __future__ import annotations

from pathlib import Path

from mlflash.memory.slot_header import HEADER_NBYTES, unpack


def flip(path: Path, *places: int, bit: int = 1) -> None:
    """Flip a bit of some bytes of a file."""
    with path.open("r+b") as file:
        for place in places:
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ bit]))


def damage(folder: Path, step: int) -> int:
    """Flip a byte of all that the slots below a folder hold of a step, copies too; gives how many these are."""
    damaged = 0
    for path in sorted(folder.rglob("slot-*")):
        page = path.read_bytes()[:HEADER_NBYTES]
        if page[:8] == b"MLFLASH\0" and (header := unpack(page)).step == step:
            flip(path, header.extents.payload_start)
            damaged += 1
    return damaged
