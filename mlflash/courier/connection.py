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
from ..launch import program_mpi
from ..launch.agent_client import AgentClient, AgentLost, AgentRefused
from ..launch.courier_cores import own_seat
from ..launch.launcher_variables import Launched
from ..launch.mpi_library import LIBRARY, needs_launcher
from ..launch.rendezvous import Meeting, who_am_i
from ..memory.node_directory import claim_user_directory
from .link import ENTRY, CourierLink

_AGENT_S = 60.0  # limit for the imports of an agent, which may come from a slow file system
_links: list[CourierLink] = []  # in the same order on all ranks that have them
_making: AgentClient | None = None  # its courier is being started; other ranks may be lost meanwhile


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
        found = _made(config, _meeting_place(config.memory, config.job), me.size, _meeting(config, comm, me), comm)
        _links.append(found)
    found.check()
    return found


def find_agent(config: Config, size: int) -> AgentClient:
    """Connect to the agent that forks the couriers of this process, for a job of so many ranks; start it if needed.

    Raises MpiUnavailable: there is no MPI for couriers, or one that only its own launcher can start.
    """
    seat = own_seat(os.environ).to_text()
    try:
        agent = AgentClient(ENTRY, os.environ, _AGENT_S, job=config.job, memory=config.memory, mpi=size > 1, seat=seat)
    except (AgentLost, AgentRefused) as error:
        raise MpiUnavailable(
            f"couriers cannot be started: {error}. If there is no MPI: {pip_install('mpich')}, or name the library of "
            f"your cluster's MPI in {LIBRARY}"
        ) from error
    if needs_launcher(agent.vendor):
        agent.close()
        raise MpiUnavailable(
            f"couriers need an MPI that starts without its launcher: {pip_install('mpich')}, or name the library "
            f"of your cluster's MPICH, Cray MPICH or Intel MPI in {LIBRARY}. The program itself may use "
            f"{agent.vendor}, and its launcher",
            found=agent.vendor,
        )
    return agent


def _meeting(config: Config, comm: Any, me: Launched) -> Meeting | None:
    """How the ranks of a communicator meet: by the program's own MPI. None: as `rendezvous` finds possible."""
    world = program_mpi.world_of(me) if comm is None else comm
    if world is None:
        return None
    share: Callable[[str | None, float], str] = lambda text, left: program_mpi.share(world, text, left)
    return Meeting(me, "the program's MPI" if comm is None else "comm=", config.timeout_s, share)


def link_anew(config: Config, meeting: Meeting) -> None:
    """Make a new connection of this process after `leave`. Collective over the current ranks.

    `interrupt` ends it early, if ``check`` of the meeting raises by then.

    Raises:
        MpiUnavailable: the agent of this node cannot be started.
        DeadlineExceeded: some ranks did not come in time.
    """
    _links[:] = [_made(config, None, meeting.me.size, meeting)]


def _made(config: Config, directory: Path | None, size: int, meeting: Meeting | None,
          comm: Any = None) -> CourierLink:  # fmt: skip
    global _making
    _making = agent = find_agent(config, size)
    try:
        return CourierLink(config, directory, agent, meeting, comm)
    except BaseException:
        agent.close()
        raise
    finally:
        _making = None


def interrupt(why: MlflashError) -> None:
    """Fail everything that waits for the courier of this process, permanently. Not collective; any thread."""
    if (agent := _making) is not None:
        agent.close()
    for one in _links:
        one.interrupt(why)


def leave(timeout_s: float = 10.0) -> None:
    """Give up the connections of this process, after `interrupt`."""
    while _links:
        _links.pop().abandon(timeout_s)


def _meeting_place(memory: str, job: str) -> Path | None:
    """Where ranks of one host may meet: this user's directory in memory, or None if there can be none.

    If something is wrong with the directory, the courier finds it later and tells all ranks.
    """
    usual = Path(memory, f"mlflash-{os.getuid()}")  # the meeting makes it
    if os.path.isdir(memory) and not os.path.lexists(usual):
        return usual
    try:
        return Path(claim_user_directory(memory, job))
    except (OSError, MlflashError):
        return None


def close_links() -> None:
    """End the couriers of this process when no Checkpointer needs them any more."""
    while _links:
        _links.pop().close()


os.register_at_fork(after_in_child=_links.clear)
