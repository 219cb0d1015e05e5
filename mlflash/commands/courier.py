"""The command ``mlflash courier``."""

from __future__ import annotations

import os

import click

from ..command_line.options import job_option, memory_option
from ..wireup.zygote_host import READY, ZygoteHost


@click.command()
@job_option
@memory_option
def courier(job: str | None, memory: str) -> None:
    """Start couriers for the trainers of this job on this node, so that they outlive what kills these.

    Where a scheduler kills a step of a job with all that its trainers have started, a commit that is on its way dies,
    too. In another step of the same job, one process on each node, this command prevents it:

        srun --overlap --ntasks-per-node=1 --cpu-bind=none mlflash courier &

    `mlflash run` does so by itself.

    Trainers that start later find it by the job, that of Slurm or the name of MLFLASH_JOB, and by MLFLASH_MEMORY. It
    ends at SIGTERM or SIGINT, when the last courier has.
    """
    environment = {**os.environ, "MLFLASH_MEMORY": memory} | ({"MLFLASH_JOB": job} if job else {})
    try:
        host = ZygoteHost(environment)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    with host:
        click.echo(READY)
        host.run()
