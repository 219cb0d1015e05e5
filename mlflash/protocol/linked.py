"""The connections of this process to its couriers.

All Checkpointers of the job share one. Ranks of a communicator get couriers of their own, if no connection of theirs
has them all: other ranks need not take part in their Checkpointer.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..config import Config
from ..errors import MlflashError, MpiUnavailable, pip_install
from ..memory import user_directory
from ..wireup import mpich_segments, program_mpi
from ..wireup.launch import Meeting
from ..wireup.launcher_variables import Launched
from ..wireup.mpi_library import LIBRARY, needs_launcher
from ..wireup.rendezvous import who_am_i
from ..wireup.zygote_client import ZygoteClient, ZygoteLost
from .courier_link import ENTRY, CourierLink

_ZYGOTE_S = 60.0  # limit for its imports, which may come from a slow file system
_links: list[CourierLink] = []  # in the same order on all ranks that have them
_making: ZygoteClient | None = None  # its courier is being started; other ranks may be lost meanwhile
_left: set[str] = set()  # shared memory that others still mapped when the last connection was given up


def find(comm: Any = None) -> CourierLink | None:
    """The connection of this process whose couriers are those of all ranks of a communicator; None: there is none yet.

    ``comm``: of mpi4py; None: all ranks of the job. Not collective, and the same on all these ranks.
    """
    return next((link for link in _links if link.ranks_of(comm) is not None), None)


def link(config: Config, comm: Any = None) -> CourierLink:
    """The connection of `find`. The first Checkpointer of these ranks makes it, collectively over them.

    Raises:
        Closed: its courier has ended.
        MpiUnavailable: there is no MPI for couriers, or one that only its own launcher can start.
        WorldMismatch: the ranks cannot find each other, or launcher and torch.distributed contradict each other.
        DeadlineExceeded: some ranks did not come in time.
    """
    if (found := find(comm)) is None:
        me = who_am_i(os.environ) if comm is None else Launched(comm.rank, comm.size, None, "MPI")
        zygote = start_zygote(me.size)  # first, because it imports while this process goes on
        found = _made(config, _meeting_place(config.memory, config.job), zygote, _meeting(config, comm, me), comm)
        _links.append(found)
    found.check()
    return found


def start_zygote(size: int) -> ZygoteClient:
    """Start the process that forks the couriers of this process, for a job of so many ranks."""
    return ZygoteClient([ENTRY], os.environ, mpi=size > 1)


def _meeting(config: Config, comm: Any, me: Launched) -> Meeting | None:
    """How the ranks of a communicator meet: by the program's own MPI. None: as `rendezvous` finds possible."""
    world = program_mpi.world_of(me) if comm is None else comm
    if world is None:
        return None
    share: Callable[[str | None, float], str] = lambda text, left: program_mpi.share(world, text, left)
    return Meeting(share, lambda: None, config.timeout_s, "the program's MPI" if comm is None else "comm=", me)


def link_anew(config: Config, zygote: ZygoteClient, meeting: Meeting) -> None:
    """Make a new connection of this process after `leave`. Collective over the current ranks.

    `interrupt` ends it early, if ``check`` of the meeting raises by then.

    Raises:
        MpiUnavailable: the process that starts couriers has ended.
        DeadlineExceeded: some ranks did not come in time.
    """
    global _making
    _making = zygote
    try:
        _links[:] = [_made(config, None, zygote, meeting)]
    finally:
        _making = None


def _made(config: Config, directory: Path | None, zygote: ZygoteClient, meeting: Meeting | None,
          comm: Any = None) -> CourierLink:  # fmt: skip
    try:
        vendor = zygote.vendor(_ZYGOTE_S)
        if needs_launcher(vendor):
            raise MpiUnavailable(
                f"couriers need an MPI that starts without its launcher: {pip_install('mpich')}, or name the library "
                f"of your cluster's MPICH, Cray MPICH or Intel MPI in {LIBRARY}. The program itself may use {vendor}, "
                "and its launcher",
                found=vendor,
            )
        return CourierLink(config, directory, zygote, meeting, comm)
    except BaseException as error:
        zygote.stop(0)
        if not isinstance(error, ZygoteLost):
            raise
        raise MpiUnavailable(
            "couriers cannot be started, and the output above says why. If there is no MPI: "
            f"{pip_install('mpich')}, or name the library of your cluster's MPI in {LIBRARY}",
            found=str(error),
        ) from error


def interrupt(why: MlflashError) -> None:
    """Fail everything that waits for the courier of this process, permanently. Not collective; any thread."""
    if (zygote := _making) is not None:  # the zygote of rank 0 has the store at which all ranks meet
        zygote.process.kill()
    for one in _links:
        one.interrupt(why)


def leave(timeout_s: float = 10.0) -> None:
    """Give up the connections of this process, after `interrupt`."""
    global _left
    while _links:
        _left = mpich_segments.remove_unmapped(_left | _links.pop().abandon(timeout_s))


def _meeting_place(memory: str, job: str) -> Path | None:
    """Where ranks of one host may meet: this user's directory in memory, or None if there can be none.

    If something is wrong with the directory, the courier finds it later and tells all ranks.
    """
    usual = Path(memory, f"mlflash-{os.getuid()}")  # the meeting makes it
    if os.path.isdir(memory) and not os.path.lexists(usual):
        return usual
    try:
        return Path(user_directory.claim(memory, job))
    except (OSError, MlflashError):
        return None


def close_links() -> None:
    """End the couriers of this process when no Checkpointer needs them any more."""
    while _links:
        _links.pop().close()


os.register_at_fork(after_in_child=_links.clear)
