"""What the commands share: options, exit codes, one JSON document, errors in words, all processes of a command.

Exit codes: 0, all is well; 1, something is wrong, or there is nothing to restore; 2, the command was called wrongly.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import click

from .. import config
from ..config import Config
from ..errors import ConfigError, DeadlineExceeded, MlflashError
from ..wire.world import World, find_comm
from . import completing

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

FINE, WRONG = 0, 1
_WIDE = 200  # columns, where the output is no terminal

job_option = click.option(
    "--job", envvar="MLFLASH_JOB", metavar="NAME", shell_complete=completing.jobs,
    help="The job. [that of the directory, else the only one here]"
)  # fmt: skip
memory_option = click.option(
    "--memory", envvar="MLFLASH_MEMORY", default="/dev/shm", show_default=True, shell_complete=completing.directories,
    help="Memory file system."
)  # fmt: skip
directory_option = click.option(
    "--directory", "-d", metavar="DIR", shell_complete=completing.directories,
    help="Where the job drains to: a directory or a URL."
)  # fmt: skip
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


def job_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options that say which job it is about, and --json."""
    return directory_option(job_option(memory_option(json_option(command))))


def settings(memory: str | None, job: str | None, directory: str | None) -> Config:
    """Read the settings of a job as a Checkpointer would, from options and environment. Not collective.

    The kill switch is let go of: it is for training, and a command does what it is told.

    Raises:
        UsageError: one makes no sense.
    """
    os.environ.pop(config.DISABLE, None)
    try:
        # Without a name given any will do: only `jobs.choose` says which job it is.
        return config.from_environment(os.environ, directory, job=job or "any", memory=memory, drain_every=0)
    except ConfigError as error:
        raise click.UsageError(str(error)) from None


def run_together(given: Config, as_json: bool, work: Callable[[World], int]) -> NoReturn:
    """Do the work of a command on all processes it was started on, and end them with one exit code.

    Collective over COMM_WORLD under an MPI launcher or srun; else this process is alone.

    Args:
        given: settings.
        as_json: an error, too, is a JSON document on stdout.
        work: gives the exit code; that of rank 0 counts. An MlflashError or ClickException is the same on all ranks.
    """
    world: World | None = None
    try:
        world = World(find_comm(os.environ), given.ranks_per_node, given.timeout_s)
        world.start_job(_raise)
        world.connect()
        world.end_job()  # what a command reads may take long, and whoever has started it sees that
        code = work(world)
    except (MlflashError, click.ClickException) as error:
        code = error.exit_code if isinstance(error, click.ClickException) else WRONG
        if world is None or world.rank == 0 or isinstance(error, DeadlineExceeded):
            _say_error(error, as_json)
        if isinstance(error, DeadlineExceeded):  # of this rank alone: the others may never come
            _abort(world)
    except Exception:
        traceback.print_exc()
        _abort(world)
        code = WRONG
    if world is not None:
        sys.stdout.flush()
        code = world.broadcast(code, 0)
        world.free()
    sys.exit(code)


def _raise(error: DeadlineExceeded) -> None:
    raise error


def _say_error(error: Exception, as_json: bool) -> None:
    if isinstance(error, click.UsageError):
        error.show()
        return
    text = error.format_message() if isinstance(error, click.ClickException) else str(error)
    click.echo(f"Error: {text}", err=True)
    if as_json:
        click.echo(json.dumps({"error": text}, indent=1))


def _abort(world: World | None) -> None:
    """End the other processes too: they would wait for this one forever."""
    if world is not None and world.mpi is not None:
        sys.stdout.flush()
        world.mpi.COMM_WORLD.Abort(WRONG)


def answer(as_json: bool, document: Any, show: Callable[[Console], None]) -> None:
    """Print what a command found: for programs, or for people. Not collective; for rank 0."""
    if as_json:
        click.echo(json.dumps(document, indent=1))
        return
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if console.is_terminal:
        show(console)
        return
    console = Console(width=_WIDE, highlight=False, markup=False)
    with console.capture() as shown:
        show(console)
    for line in shown.get().splitlines():
        click.echo(line.rstrip())


def new_table(*columns: str) -> Table:
    """A table without lines; columns whose name begins with ">" are numbers."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False)
    for name in columns:
        table.add_column(name.lstrip(">"), justify="right" if name.startswith(">") else "left")
    return table
