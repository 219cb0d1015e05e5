"""What a forked courier does before and after its entry point, from the agent's fork to its end.

It keeps three descriptors of the agent: the socket to its trainer, the socket over which MPI starts (if it may start
MPI), and a pipe to the agent. It also keeps a pidfd of its trainer, because the death of a trainer that has forked
others does not close the socket. Everything else that a child of its trainer would have, it gets from there, too:
output, environment, working directory, umask and cores (`Inherited`).
"""

from __future__ import annotations

import dataclasses
import logging
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from typing import NoReturn

from .courier_mpi import mapped_by, memory_settings
from .lines import pack
from .own_process import end_with, forget_memory_policy, set_name

log = logging.getLogger("mlflash")

NOT_UP, ABORTS = "MPI was not up", "MPI_Abort"
"""How the reasons of an agent begin to kill a courier that would have ended by itself."""


@dataclasses.dataclass
class Courier:
    """The only argument of a courier's entry point."""

    epoch: str  # the name of this world of MPI
    rank: int
    nodes: tuple[int, ...]  # of each rank, any numbers
    channel: socket.socket  # to its trainer
    trainer_pidfd: int  # readable when the trainer has ended
    reports_fd: int  # a pipe to the agent
    has_mpi: bool = True  # the only rank of a world may not initialize MPI, and does not need it
    trains_on: frozenset[int] = frozenset()  # the cores that its trainer had at its start
    cores: frozenset[int] = frozenset()  # for this process; empty: those of the trainer

    def tell_mpi_is_up(self) -> None:
        """Tell the agent that MPI is initialized, and what to remove if this process is killed.

        Call it right after MPI_Init.
        """
        os.write(self.reports_fd, pack({"mapped": sorted(mapped_by("self"))}))


@dataclasses.dataclass(frozen=True)
class CourierEnd:
    """How a courier ended."""

    status: int | None  # None after a signal
    signal: int | None  # None after an exit
    why: str | None  # why its agent killed it; None if it did not


@dataclasses.dataclass
class Inherited:
    """What a courier has from its trainer, as if that had forked it."""

    channel: socket.socket  # the courier's end of the connection to it
    trainer_pidfd: int
    name: str  # of the courier's process, which says whose it is
    output: tuple[int, int]  # descriptors of standard output and standard error
    environment: Mapping[str, str]
    directory: str
    umask: int
    cores: frozenset[int]


def run(
    entry: Callable[[Courier], object],
    courier: Courier,
    inherited: Inherited,
    pmi: socket.socket | None,
    agent_pid: int,
    reads: bool,
) -> NoReturn:
    """Be a courier in a process that was just forked, and end.

    The process ends with status 0 when the entry point returns, with that of a SystemExit, and with 1 after any other
    exception, which is printed. No cleanup of the agent runs in it.
    """
    status = 1
    try:
        for given, fd in zip(inherited.output, (1, 2), strict=True):
            os.dup2(given, fd)
        kept = {0, 1, 2, courier.channel.fileno(), courier.trainer_pidfd, courier.reports_fd}
        _leave(agent_pid, kept if pmi is None else kept | {pmi.fileno()})
        _inherit(inherited)
        if pmi is not None:
            os.environ.update(memory_settings(reads, os.environ))
            os.environ.update(PMI_FD=str(pmi.fileno()), PMI_RANK=str(courier.rank), PMI_SIZE=str(len(courier.nodes)))
        if cores := courier.cores or inherited.cores:  # before any thread starts, because threads inherit them
            try:
                os.sched_setaffinity(0, cores)
            except OSError as problem:  # the cgroup may have changed: the courier runs on the cores of its trainer
                log.debug("the courier of rank %d cannot run on the cores %s: %s", courier.rank,
                          sorted(cores), problem.strerror)  # fmt: skip
        entry(courier)
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):  # nobody reads the stream any more
                pass
        os._exit(status)


def ignore_signals_of_the_step() -> None:
    """Ignore what a scheduler sends to all processes of a step: it is meant for the trainers.

    Agents and couriers end when their trainers do, and couriers commit what they were given first.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def _inherit(inherited: Inherited) -> None:
    os.environ.clear()
    os.environ.update(inherited.environment)
    os.umask(inherited.umask)
    forget_memory_policy()
    set_name(inherited.name)
    try:
        os.chdir(inherited.directory)
    except OSError:  # it was removed; a trainer that goes on there needs no other
        os.chdir("/")


def _leave(agent_pid: int, kept: Collection[int]) -> None:
    os.setsid()
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        try:
            signal.signal(number, signal.SIG_DFL)
        except OSError:  # a signal that the C library keeps for itself
            continue
    ignore_signals_of_the_step()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # as in any Python: an ended trainer, or ulimit -f, is an OSError
        signal.signal(number, signal.SIG_IGN)
    # A courier whose MPI fails because another node has died must not leave its memory in the working directory.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    # If the agent ends, nobody would notice the end of this process or remove what it leaves.
    end_with(agent_pid)
    # Close the descriptors, not the socket objects: the agent's frames, which never return here, still refer to those.
    for fd in [int(name) for name in os.listdir("/proc/self/fd")]:
        if fd not in kept:
            try:
                os.close(fd)
            except OSError:  # the descriptor of the directory itself
                pass
