"""Run a command as a rank of an emulated node: ``python on_node.py COMMAND...`` under any launcher.

Each node has its own part of the memory directory MLFLASH_MEMORY, and so many ranks as RANKS_PER_NODE says.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_RANK = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "RANK", "SLURM_PROCID")  # as launchers name it


def settings_of(rank: int, memory: Path | str, per_node: int = 1) -> dict[str, str]:
    """The settings ``node`` and ``memory`` of a rank. It makes the memory of the node."""
    node = f"node{rank // per_node}"
    part = Path(memory, node)
    part.mkdir(0o700, parents=True, exist_ok=True)
    return {"node": node, "memory": str(part)}


def disk_of(rank: int, root: Path | str, per_node: int = 1) -> str:
    """The setting ``copies`` of a rank: the disk of its node, which is made."""
    disk = Path(root, f"disk{rank // per_node}")
    disk.mkdir(0o700, parents=True, exist_ok=True)
    return str(disk)


if __name__ == "__main__":
    rank = int(next((os.environ[name] for name in _RANK if name in os.environ), 0))
    per_node = int(os.environ["RANKS_PER_NODE"])
    given = settings_of(rank, os.environ["MLFLASH_MEMORY"], per_node)
    if "MLFLASH_COPIES" in os.environ:
        given["copies"] = disk_of(rank, os.environ["MLFLASH_COPIES"], per_node)
    os.environ |= {f"MLFLASH_{name.upper()}": value for name, value in given.items()}
    os.execvp(sys.argv[1], sys.argv[1:])
