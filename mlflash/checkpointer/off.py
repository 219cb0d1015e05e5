"""Off, by ``MLFLASH_DISABLE=1`` or by ``enabled=False``: training runs as if mlflash were not there (docs/off.md)."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from typing import Any

from .. import config
from ..drain.drain_handle import Drain
from ..save.snapshot import Snapshot

log = logging.getLogger("mlflash")
_RANK_NAMES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
_logged: set[str] = set()


def turned_off(enabled: bool = True, comm: Any = None) -> bool:
    """Whether mlflash is off, for the entry of an adapter. If so, the first process logs each reason once."""
    if config.is_enabled(os.environ, enabled):
        return False
    why = "enabled=False" if config.is_enabled(os.environ) else f"{config.DISABLE}={os.environ[config.DISABLE]}"
    if why not in _logged and _rank(comm) == 0:
        log.warning("mlflash is off (%s): nothing is saved in memory, and nothing is restored from there", why)
    _logged.add(why)
    return True


def _rank(comm: Any) -> int:
    """Return this rank, as far as it can be found without starting MPI; otherwise 0."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    for name in _RANK_NAMES:
        if os.environ.get(name, "").isdecimal():
            return int(os.environ[name])
    return 0 if comm is None else int(comm.rank)


class Disabled:
    """Stands for all parts of a Checkpointer that is off: courier, saves, restores, drains, and what adapters call."""

    is_a, last_step = "", None
    restart_scope = contextlib.nullcontext

    def __init__(self, comm: Any) -> None:
        self._rank = _rank(comm)

    def save(self, step: Any, state: object, until: object = None) -> Snapshot:
        snapshot = Snapshot(int(step) if hasattr(step, "__index__") else -1, lambda: None)
        snapshot.leave()
        return snapshot

    def drain(self) -> Drain:
        drain = Drain(-1)
        drain.end(None)
        return drain

    def _nothing(self, *args: object) -> None: ...

    call = restore = prepare = wait = settle = loaded_elsewhere = _nothing

    def steps(self) -> list[int]:
        return []

    def load(self, *args: object) -> tuple[None, None]:
        return None, None

    def ask(self, method: str) -> Any:
        if method == "survives":
            return "nothing: mlflash is off"
        return {
            "enabled": False, "rank": self._rank, "node": socket.gethostname(), "scheme": "none", "group": [],
            "partners": [], "shared with": [], "transport": "", "mpi": "", "job": "", "memory": "", "restored_from": "",
            "drain": None, "send rate": None, "slots": [], "counts": {}, "seconds": {},
        }  # fmt: skip
