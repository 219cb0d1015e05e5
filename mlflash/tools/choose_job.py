"""Choose the job that a command works on."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Mapping, Sequence

import click

from ..config import Config, job_name
from ..memory.node_directory import jobs_of
from ..mpi.world import World, gather
from .node_memory import look_at_job

_NAMED = 5  # jobs in an error message


_Known = tuple[str, int, bool]
"""A job: its name, the time of its newest save in ns since 1970, and whether it is alive."""


def choose(world: World, given: Config, job: str | None, is_live: bool = True) -> str:
    """Choose the job: the named one, else the one of the directory, else the only one in memory, or the only live one.

    With ``is_live=False`` it takes the only dead one instead. Raises UsageError if several jobs remain.
    """
    told = gather(world, _jobs_here(given, job) if world.local_rank == 0 else [])
    chosen: str | click.ClickException
    try:
        chosen = _choose([known for of_node in told for known in of_node], given, job, is_live)
    except click.ClickException as error:
        chosen = error
    chosen = world.broadcast(chosen, 0)
    if isinstance(chosen, click.ClickException):
        raise chosen
    return chosen


def choose_here(given: Config, job: str | None) -> str:
    """Choose the job among those of this node. See `choose`."""
    return _choose(_jobs_here(given, job), given, job)


def _jobs_here(given: Config, job: str | None) -> list[_Known]:
    names = jobs_of(given.memory)
    if job or given.directory or len(names) < 2:  # the names are enough
        return [(name, 0, False) for name in names]
    looks = [look_at_job(given.memory, name) for name in names]
    return [(look.job, 0 if look.newest is None else look.newest.unix_ns, look.node.pid is not None) for look in looks]


def _choose(known: Sequence[_Known], given: Config, job: str | None, is_live: bool = True) -> str:
    there = list(dict.fromkeys(name for name, *_ in sorted(known, key=lambda each: (-each[1], each[0]))))
    live = {name for name, _, lives in known if lives}
    preferred = live if is_live else set(there) - live
    return decide(there, os.environ, job, given.directory, given.memory, preferred)


def decide(there: Collection[str], env: Mapping[str, str], job: str | None, directory: str | None, memory: str,
           preferred: Collection[str] = ()) -> str:  # fmt: skip
    """Choose one of the jobs that have memory here.

    Args:
        job: the given name. With a directory, a job of this name need not have memory here.
        preferred: those of them of which the only one is taken, such as the live ones.

    Example:
        ``slurm-71-1c0d5a3e`` is the job of ``/lustre/me/run42``, also outside of Slurm job 71, because 1c0d5a3e is the
        hash of the directory.
    """
    if job:
        if job in there or directory:
            return job
        others = f"; jobs here: {_few(there)}" if there else ""
        raise click.ClickException(f"job {job} holds no memory in {memory} on {socket.gethostname()}{others}")
    if directory:
        name = job_name(env, directory)
        digest = job_name({}, directory).rpartition("-")[2]
        alike = sorted(other for other in there if other.endswith(f"-{digest}"))
        if name in there or not alike:
            return name
        if len(alike) == 1:
            return alike[0]
        raise click.UsageError(f"several jobs drain to {directory}: name one with --job: {_few(alike)}")
    if not there:
        host = socket.gethostname()
        raise click.ClickException(f"nothing of this user is in {memory} on {host}: log in to a node that the job ran "
                                   "on, or name another memory file system with --memory")  # fmt: skip
    for jobs in (there, preferred):
        if len(jobs) == 1:
            return next(iter(jobs))
    raise click.UsageError(f"which job? Name one with --job: {_few(there)}")


def _few(jobs: Collection[str]) -> str:
    names = ", ".join(list(jobs)[:_NAMED])
    return names if len(jobs) <= _NAMED else f"{names}, ... ({len(jobs)} jobs: mlflash jobs)"
