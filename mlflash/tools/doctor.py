"""The command ``mlflash doctor``."""

from __future__ import annotations

import os
import sys

import click

from ..config import DISABLE, from_environment, slots_of
from ..errors import ConfigError, WorldMismatch
from . import shell_completion
from .options import BYTES, certify_after_option, draining_option, json_option, memory_option
from .run_on_ranks import FINE, WRONG


@click.command()
@click.option("--need", callback=BYTES, help="State of one rank, such as 12GiB or 80GB: check that its slots fit.")
@click.option("--redundancy", shell_complete=shell_completion.schemes,
              help="Scheme that --need is counted for.  [default: MLFLASH_REDUNDANCY, or copy]")  # fmt: skip
@draining_option
@certify_after_option
@click.option("--nodes", type=click.IntRange(1), help="Nodes of the job.  [default: as started]")
@click.option("--ranks-per-node", type=click.IntRange(1), help="Ranks on each node.  [default: as started]")
@click.option("--timeout", type=click.FloatRange(1), default=60, show_default=True, metavar="SECONDS",
              help="Longest time of each check.")  # fmt: skip
@memory_option
@json_option
def doctor(need: int | None, redundancy: str | None, draining: bool, certify_after: int, nodes: int | None,
           ranks_per_node: int | None, timeout: float, memory: str, as_json: bool) -> None:  # fmt: skip
    """Check nodes, MPI, memory, Slurm and software before a job runs. Start it as you will start the training.

    \b
    mlflash doctor
    srun -N2 --ntasks-per-node=8 --mpi=pmi2 mlflash doctor --need 12GiB

    The line below a warning or an error says what to do. Exits with 1 if a check finds an error.
    """
    from ..launch.launcher_variables import launched
    from .doctor_context import Context
    from .doctor_examination import Examination
    from .doctor_findings import Level
    from .doctor_watchdog import Watch

    try:
        environment = {**os.environ, DISABLE: ""}  # `software_checks.environment` reports it
        settings = from_environment(environment, None, job="any", memory=memory, redundancy=redundancy, drain_every=0)
        slots = slots_of(certify_after)
        context = Context(settings, os.environ, launched(os.environ), need, slots + draining, slots, nodes,
                          ranks_per_node)  # fmt: skip
    except (ConfigError, WorldMismatch) as error:
        raise click.UsageError(str(error)) from None
    watch = Watch(context.rank == 0, as_json, timeout)
    examination = Examination(context, watch, timeout)
    try:
        found = examination.run()
        if context.rank == 0:
            found.print(as_json)
            sys.stdout.flush()
        code = examination.end(WRONG if found.count(Level.ERROR) else FINE)
    finally:
        watch.over()
    sys.exit(code)
