"""Whether a courier is a thread or a process, where a program leaves that open.

All ranks choose alike, as they run the same program with the same settings and the same MPI. This is the first thing
that is done for a courier that is a process: its zygote starts, and imports while this process does. So nothing is
imported here that takes time: what the trainer has at its end, `courier_link` and `in_process`, comes after it.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import Any

from ..errors import MpiUnavailable
from ..wireup.pmi_client import uses_mpi
from ..wireup.rendezvous import way, who_am_i
from ..wireup.zygote_client import ZygoteClient, ZygoteLost

ENTRY = "mlflash.courier.process_main:run"
"""What a courier does."""
_NO_PMI = ("Open MPI",)  # as mpi4py names it
_ZYGOTE_S = 60.0  # for its imports, from a file system that may be slow


@dataclasses.dataclass(frozen=True)
class Choice:
    """What a courier is.

    Attributes:
        is_process: it is one, and else a thread.
        why: in a few words.
        zygote: that was started for it; None: there is one already, or none is needed.
    """

    is_process: bool
    why: str
    zygote: ZygoteClient | None = None


def choose(courier: str, comm: Any) -> Choice:
    """Choose what the courier of this process is, and start its zygote. Not collective.

    Args:
        courier: "thread", "process" or "auto".
        comm: a communicator that the program gives; None: it gives none.

    Raises:
        MpiUnavailable: it is to be a process, and this MPI is started by its own launcher alone.
        WorldMismatch: the launcher's variables and torch.distributed contradict each other.
        DeadlineExceeded: the zygote does not come up.
    """
    if comm is not None:
        return Choice(False, "comm= was given")
    if courier == "thread":
        return Choice(False, 'courier="thread"')
    link = sys.modules.get(f"{__package__}.linked")
    if link is not None and link.is_linked():
        return Choice(True, "as the others of this process are")
    if courier == "process":
        zygote = start_zygote(who_am_i(os.environ).size)
        if who_am_i(os.environ).size > 1 and (vendor := _vendor(zygote)) in _NO_PMI:
            zygote.stop(0)
            raise MpiUnavailable(
                "couriers that are processes need an MPI that speaks PMI-1, such as MPICH (pip install "
                f"'mlflash[mpich]'), Intel MPI or Cray MPICH; {vendor} works with MLFLASH_COURIER=thread and its own "
                "mpiexec or srun",
                found=vendor,
            )
        return Choice(True, 'courier="process"', zygote)
    if uses_mpi():
        return Choice(False, "this program uses MPI itself")
    if not way(os.environ, who_am_i(os.environ)):
        return Choice(False, "its launcher lets ranks find each other by MPI only")
    zygote = start_zygote(who_am_i(os.environ).size)
    vendor = _vendor(zygote)
    if vendor is None or not would_be_process(courier, vendor):  # a thread says what is wrong with this MPI
        zygote.stop(0)
        known = f"{vendor} cannot be started without its launcher"
        return Choice(False, known if vendor else "a process cannot be started for it; what was printed above says why")
    return Choice(True, "nothing speaks against it", zygote)


def _vendor(zygote: ZygoteClient) -> str | None:
    """Whose the MPI of couriers is, as mpi4py names it; None where it cannot be loaded."""
    try:
        return zygote.vendor(_ZYGOTE_S)
    except ZygoteLost:
        return None


def would_be_process(courier: str, vendor: str) -> bool:
    """Whether couriers of these settings are processes in a program that does not use MPI itself. Not collective.

    Args:
        courier: "thread", "process" or "auto".
        vendor: of MPI, as mpi4py names it.
    """
    return courier == "process" or (courier == "auto" and vendor not in _NO_PMI)


def start_zygote(size: int) -> ZygoteClient:
    """Start what forks the couriers of this process. Not collective.

    Args:
        size: how many ranks there are.
    """
    return ZygoteClient([ENTRY], os.environ, mpi=size > 1)
