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
              shell_complete=shell_completion.directories,
              help="Directory to write the files to.  [default: here]")  # fmt: skip
@click.option("--force", is_flag=True, help="Overwrite existing files, train.py too.")
@click.option("--account", metavar="NAME", help="Slurm account.  [default: your default account]")
@click.option("--partition", metavar="NAME", help="Slurm partition.  [default: Slurm's default]")
@click.option("--nodes", "-N", type=click.IntRange(1),
              help="Nodes that train.  [default: 2, or what the partition has]")  # fmt: skip
@click.option("--spares", type=click.IntRange(0),
              help="Nodes that wait to replace a lost one.  [default: 1, if the partition has one left]")  # fmt: skip
@click.option("--ranks-per-node", type=click.IntRange(1),
              help="Ranks on each node.  [default: one for each GPU, else 1]")  # fmt: skip
@click.option("--gpus-per-node", type=click.IntRange(0),
              help="GPUs of each node.  [default: one for each rank, if there are GPUs]")  # fmt: skip
@click.option("--time", metavar="TIME", help="Time limit, as for sbatch.  [default: the partition's limit]")
@click.option("--mpi", metavar="TYPE", help="Value of srun --mpi.  [default: what mpi4py's MPI needs]")
@click.option("--job-name", metavar="NAME",
              help="Name in squeue and of the output file.  [default: the template's name]")  # fmt: skip
@click.option("--directory", "-d", metavar="DIR", shell_complete=shell_completion.directories,
              help="Directory that the job drains to.  [default: JOB-NAME-checkpoints next to the files]")  # fmt: skip
@click.option("--srun-args", metavar="WORDS", help="More arguments for srun, for example for a container.")
@click.option("--script", metavar="FILE", shell_complete=shell_completion.files,
              help="Your training script, instead of the train.py that the command writes.")  # fmt: skip
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, shell_complete=shell_completion.files)
def template(name: str | None, output: Path, force: bool, **values: Any) -> None:
    """Write the batch script NAME.sbatch, with nothing left to edit, and the train.py that it starts.

    Use it for your first job on a cluster, on a node where sbatch works. Without NAME it lists the templates.

    \b
    mlflash template
    mlflash template train --nodes 8 --script my.py -- --out '$directory'

    It asks Slurm and mpi4py for the values that you do not give. It leaves out of the script what they do not know.
    ARGUMENTS after -- go to the training. They may use the script's own variables, such as $directory.
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
    """Print each value in the script, and where it comes from."""
    for name, choice in chosen.items():
        if name not in _NOT_SHOWN:
            click.echo(
                f"{name:15} {choice.value} ({choice.why})"
                if choice.value is not None
                else f"{name:15} left out: {choice.why}"
            )
