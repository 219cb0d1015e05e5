"""Damage to what slots hold, while no job runs."""

from __future__ import annotations

from pathlib import Path

from mlflash.memory.slot_header import HEADER_NBYTES, unpack


def damage(folder: Path, step: int) -> int:
    """Flip a byte of all that the slots below a folder hold of a step, copies too; gives how many these are."""
    damaged = 0
    for path in sorted(folder.rglob("slot-*")):
        with path.open("r+b") as file:
            page = file.read(HEADER_NBYTES)
            if page[:8] != b"MLFLASH\0" or (header := unpack(page)).step != step:
                continue
            at = header.extents.payload_start
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1]))
            damaged += 1
    return damaged
