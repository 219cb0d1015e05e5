"""The command ``mlflash template``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click

from ..command_line import shell_completion
from ..errors import ConfigError
from ..templates.choices import TEMPLATES, Asked, Choice, choose
from ..templates.cluster import look
from ..templates.files import texts, write

_NOT_SHOWN = ("train",)


@click.command()
@click.argument("name", type=click.Choice(list(TEMPLATES)), required=False)
@click.option("--output", "-o", type=click.Path(file_okay=False, path_type=Path), default=Path(), metavar="DIR",
              shell_complete=shell_completion.directories, help="Where the files go. [here]")  # fmt: skip
@click.option("--force", is_flag=True, help="Write over files that are there, train.py too.")
@click.option("--account", metavar="NAME", help="Who pays. [your default account]")
@click.option("--partition", metavar="NAME", help="Where it runs. [Slurm's default]")
@click.option("--nodes", "-N", type=click.IntRange(1), help="Nodes that train. [2, or what the partition has]")
@click.option("--spares", type=click.IntRange(0), help="Nodes that wait until one dies. [1, where there is one left]")
@click.option("--ranks-per-node", type=click.IntRange(1), help="Ranks on each node. [one for each GPU, else 1]")
@click.option("--gpus-per-node", type=click.IntRange(0), help="GPUs of each node. [one for each rank, if there are]")
@click.option("--time", metavar="TIME", help="When Slurm ends the job, as for sbatch. [the partition's limit]")
@click.option("--mpi", metavar="TYPE", help="What srun --mpi is to be. [what mpi4py's MPI wants]")
@click.option("--job-name", metavar="NAME", help="Name in squeue, and of the output file. [the template's]")
@click.option("--directory", "-d", metavar="DIR", shell_complete=shell_completion.directories,
              help="Where checkpoints are drained to. [JOB-NAME-checkpoints, beside the files]")  # fmt: skip
@click.option("--srun-args", metavar="WORDS", help="Further words for srun, as of a container.")
@click.option("--script", metavar="FILE", shell_complete=shell_completion.files,
              help="Your training, in the place of the train.py that is written.")  # fmt: skip
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, shell_complete=shell_completion.files)
def template(name: str | None, output: Path, force: bool, **values: Any) -> None:
    """Write NAME.sbatch, a batch script with nothing left to edit, and the train.py that it starts.

    Without NAME it lists the templates. What is not given is asked of Slurm and of mpi4py; what neither says is left
    out of the script. ARGUMENTS, after --, are for the training; in them the script's own variables are filled in:

    \b
    mlflash template train --nodes 8 --script my.py -- --out '$directory'
    """
    if name is None:
        for one, kind in TEMPLATES.items():
            click.echo(f"{one:9} {kind.line}")
        return
    try:
        asked = Asked(name, output, **values)
        chosen = choose(asked, look())
        files = texts(asked, chosen)
        write(output, files, force)
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    except OSError as error:
        raise click.ClickException(f"{error.filename or output} cannot be written: {error.strerror}") from None
    _show(chosen)
    click.echo(f"written: {' and '.join(files)}; next: sbatch {shlex.quote(str(output / f'{name}.sbatch'))}")


def _show(chosen: dict[str, Choice]) -> None:
    """Say what was filled in, and from where."""
    for name, choice in chosen.items():
        if name not in _NOT_SHOWN:
            click.echo(
                f"{name:15} {choice.value} ({choice.why})"
                if choice.value is not None
                else f"{name:15} left out: {choice.why}"
            )
