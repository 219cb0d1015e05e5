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
    """Start couriers for the trainers of this job on this node that outlive a killed job step.

    Use it in a batch script without `mlflash run`, which does this by itself. When Slurm kills a job step, it kills all
    processes that its trainers started, and a commit in progress is lost. Couriers in another step of the same job
    finish the commit. Start one process on each node, before the trainers:

    \b
    srun --overlap --ntasks-per-node=1 --cpu-bind=none mlflash courier &

    Trainers that start later find it by the job (of Slurm, or the name in MLFLASH_JOB) and by MLFLASH_MEMORY. After
    SIGTERM or SIGINT it ends as soon as the last courier has ended.
    """
    environment = {**os.environ, "MLFLASH_MEMORY": memory} | ({"MLFLASH_JOB": job} if job else {})
    try:
        host = ZygoteHost(environment)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    with host:
        click.echo(READY)
        host.run()
