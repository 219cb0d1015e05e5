"""The command ``mlflash agent``."""

from __future__ import annotations

import os
import socket

import click

from ..launch import agent_process
from .options import job_option, memory_option


@click.command()
@job_option
@memory_option
def agent(job: str | None, memory: str) -> None:
    """Start the agent of this node, so that couriers outlive a killed job step. `mlflash run` does this by itself.

    Start it once on each node, in a job step of its own, before the trainers. After SIGTERM or SIGINT it ends as soon
    as the last courier has ended.

    \b
    srun --overlap --ntasks-per-node=1 --cpu-bind=none mlflash agent &
    """
    environment = {**os.environ, "MLFLASH_MEMORY": memory} | ({"MLFLASH_JOB": job} if job else {})
    names = agent_process.kept_names(memory, environment)
    if not names:
        raise click.UsageError("this process does not know its job: set MLFLASH_JOB, or start it in a Slurm job")
    listeners = [socket.socket(socket.AF_UNIX) for _ in names]
    try:
        for listener, name in zip(listeners, names, strict=True):
            agent_process.listen(listener, name)
    except OSError:
        raise click.ClickException("an agent of this job already runs on this node") from None
    click.echo(agent_process.READY)
    agent_process.become(listeners, environment)
