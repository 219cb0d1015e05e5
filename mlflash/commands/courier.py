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
    """Start couriers that outlive a killed job step. `mlflash run` does this by itself.

    Start it once on each node, in a job step of its own, before the trainers. After SIGTERM or SIGINT it ends as soon
    as the last courier has ended.

    \b
    srun --overlap --ntasks-per-node=1 --cpu-bind=none mlflash courier &
    """
    environment = {**os.environ, "MLFLASH_MEMORY": memory} | ({"MLFLASH_JOB": job} if job else {})
    try:
        host = ZygoteHost(environment)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    with host:
        click.echo(READY)
        host.run()
