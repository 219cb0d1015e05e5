"""The MPI of the program itself, which need not be that of couriers: it tells ranks, and carries one text to them.

Nothing here imports MPI: either the program has initialized it, or it does not matter.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from ..errors import DeadlineExceeded, WorldMismatch
from .launcher_variables import Launched, launched

_MOST_NBYTES = 256
_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.02
_pending: list[Any] = []  # broadcasts that some ranks never joined: MPI may still write to their memory


def uses_mpi() -> bool:
    """Whether this program has initialized MPI itself; then the launcher's connection is MPI's."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and bool(mpi.Is_initialized()) and not mpi.Is_finalized()


def world_of(me: Launched) -> Any:
    """COMM_WORLD of the program, if it uses MPI and its ranks are those of the launcher; else None."""
    if me.size == 1 or not uses_mpi():
        return None
    world = sys.modules["mpi4py.MPI"].COMM_WORLD
    return world if (world.rank, world.size) == (me.rank, me.size) else None


def is_whole(comm: Any, environment: Mapping[str, str]) -> bool:
    """Whether a communicator has all ranks of the job, in the order of the launcher. Not collective."""
    try:
        me = launched(environment)
    except WorldMismatch:  # variables were set for a part of the ranks
        return False
    mpi = sys.modules["mpi4py.MPI"]
    return comm.size == me.size and mpi.Comm.Compare(comm, mpi.COMM_WORLD) in (mpi.IDENT, mpi.CONGRUENT)


def ranks_in(comm: Any, group: Any) -> tuple[int, ...] | None:
    """The numbers of a communicator's ranks in a group of MPI, in their order; None if it lacks any. Not collective."""
    own = comm.Get_group()
    ranks = own.Translate_ranks(list(range(own.size)), group)
    own.Free()
    return None if sys.modules["mpi4py.MPI"].UNDEFINED in ranks else tuple(ranks)


def share(comm: Any, text: str | None, timeout_s: float) -> str:
    """Give rank 0's text, of at most 256 bytes, to all ranks of a communicator. Collective over it.

    It is one ``Ibcast`` on the communicator itself, because making another one would block. Raises DeadlineExceeded:
    rank 0 has not come.
    """
    given = (text or "").encode()
    assert len(given) <= _MOST_NBYTES
    buffer = bytearray(given.ljust(_MOST_NBYTES, b"\0"))
    request = comm.Ibcast([buffer, sys.modules["mpi4py.MPI"].BYTE], 0)
    end, pause_s = time.monotonic() + timeout_s, _PAUSE_S
    while not request.Test():
        if time.monotonic() > end:
            _pending.append((request, buffer))
            raise DeadlineExceeded(
                f"waited {timeout_s:g} s for all {comm.size} ranks to come to Checkpointer(): rank 0 of the "
                "communicator has not sent where its agent is", rank=comm.rank, ranks=[0],
            )  # fmt: skip
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return buffer.rstrip(b"\0").decode()
