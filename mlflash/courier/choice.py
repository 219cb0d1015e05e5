"""Decides whether a courier is a thread or a process, if the program does not say so.

All ranks choose alike, because they run the same program with the same settings and the same MPI. If the courier is a
process, this is the first step: its zygote starts, and imports in parallel to this process. So this module imports
nothing that takes time. The trainer's side, `courier_link` and `in_process`, is imported after it.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import Any

from ..errors import MpiUnavailable, pip_install
from ..wireup.mpi_library import LIBRARY, needs_launcher
from ..wireup.program_mpi import world_of
from ..wireup.rendezvous import way, who_am_i
from ..wireup.zygote_client import ZygoteClient, ZygoteLost

ENTRY = "mlflash.courier.process_main:run"
"""The entry point of a courier."""
_ZYGOTE_S = 60.0  # limit for its imports, which may come from a slow file system


@dataclasses.dataclass(frozen=True)
class Choice:
    """Whether a courier is a thread or a process, and the zygote that was started for it, if it needed one."""

    is_process: bool
    why: str
    zygote: ZygoteClient | None = None


def choose(courier: str, comm: Any) -> Choice:
    """Choose whether the courier of this process is a thread or a process. Start its zygote.

    Raises:
        MpiUnavailable: it must be a process, but this MPI can only be started by its own launcher.
        WorldMismatch: the launcher's variables and torch.distributed contradict each other.
        DeadlineExceeded: the zygote does not start in time.
    """
    if courier == "thread":
        return Choice(False, 'courier="thread"')
    link = sys.modules.get(f"{__package__}.linked")
    if link is not None and link.find(comm) is not None:
        return Choice(True, "like the other couriers of this process")
    me = who_am_i(os.environ) if comm is None else None
    zygote = start_zygote(comm.size if me is None else me.size)
    if courier == "process":
        if (me is None or me.size > 1) and needs_launcher(vendor := _vendor(zygote) or ""):
            zygote.stop(0)
            raise MpiUnavailable(
                "couriers need an MPI that starts without its launcher, such as MPICH "
                f"({pip_install('mpich')}), Intel MPI or Cray MPICH. {vendor} does not. {LIBRARY} names the library of "
                "couriers; the program itself may use another MPI",
                found=vendor,
            )
        return Choice(True, 'courier="process"', zygote)
    if me is not None and not way(os.environ, me) and world_of(me) is None:
        zygote.stop(0)
        return Choice(False, "under its launcher, ranks find each other by MPI only")
    vendor = _vendor(zygote)
    if vendor is None or not would_be_process(courier, vendor):  # if this MPI is broken, the thread reports it
        zygote.stop(0)
        known = f"{vendor} cannot be started without its launcher"
        return Choice(False, known if vendor else "a process cannot be started for it; the output above says why")
    return Choice(True, "nothing prevents it", zygote)


def _vendor(zygote: ZygoteClient) -> str | None:
    """The MPI implementation of couriers, as mpi4py names it; None if it cannot be loaded."""
    try:
        return zygote.vendor(_ZYGOTE_S)
    except ZygoteLost:
        return None


def would_be_process(courier: str, vendor: str) -> bool:
    """Whether couriers with these settings are processes."""
    return courier == "process" or (courier == "auto" and not needs_launcher(vendor))


def start_zygote(size: int) -> ZygoteClient:
    """Start the process that forks the couriers of this process."""
    return ZygoteClient([ENTRY], os.environ, mpi=size > 1)
