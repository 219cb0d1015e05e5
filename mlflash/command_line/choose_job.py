"""Choose the job that a command works on."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Mapping

import click

from ..config import Config, job_name
from ..memory.node_directory import jobs_of
from ..mpi.gather_on_rank_0 import gather
from ..mpi.world import World


def choose(world: World, given: Config, job: str | None, directory: str | None) -> str:
    """Choose the job: the named one, else the one of the directory, else the only one in memory.

    Collective over the world.

    Raises:
        UsageError: there are several jobs.
        ClickException: there is no job.
    """
    told = gather(world, jobs_of(given.memory) if world.local_rank == 0 else [])
    chosen: str | click.ClickException
    try:
        chosen = decide({name for names in told for name in names}, os.environ, job, given.directory, given.memory)
    except click.ClickException as error:
        chosen = error
    chosen = world.broadcast(chosen, 0)
    if isinstance(chosen, click.ClickException):
        raise chosen
    return chosen


def decide(there: Collection[str], env: Mapping[str, str], job: str | None, directory: str | None, memory: str) -> str:
    """Choose one of the jobs that have memory here.

    Not collective.

    Args:
        there: the jobs that have memory here.
        env: the environment.
        job: the given name. With a directory, a job of this name need not have memory here.
        directory: the absolute path that the job drains to.
        memory: the memory file system that holds the jobs.

    Example:
        ``slurm-71-1c0d5a3e`` is the job of ``/lustre/me/run42``, also outside of Slurm job 71, because 1c0d5a3e is the
        hash of the directory.
    """
    if job:
        if job in there or directory:
            return job
        others = f"; jobs here: {', '.join(sorted(there))}" if there else ""
        raise click.ClickException(f"job {job} holds no memory in {memory} on {socket.gethostname()}{others}")
    if directory:
        name = job_name(env, directory)
        digest = job_name({}, directory).rpartition("-")[2]
        alike = sorted(other for other in there if other.endswith(f"-{digest}"))
        if name in there or not alike:
            return name
        if len(alike) == 1:
            return alike[0]
        raise click.UsageError(f"several jobs drain to {directory}: name one with --job: {', '.join(alike)}")
    if not there:
        host = socket.gethostname()
        raise click.ClickException(f"nothing of this user is in {memory} on {host}: log in to a node that the job ran "
                                   "on, or name another memory file system with --memory")  # fmt: skip
    if len(there) > 1:
        raise click.UsageError(f"which job? Name one with --job: {', '.join(sorted(there))}")
    return next(iter(there))
