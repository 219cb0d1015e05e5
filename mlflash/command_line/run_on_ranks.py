"""Run a command on several processes: they start together, rank 0 collects the results, and all end with one exit code.

Exit codes: 0: all is well. 1: something is wrong, or there is nothing to restore. 2: the command was called wrongly.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

import click

from ..config import Config
from ..errors import DeadlineExceeded, MlflashError
from ..mpi.world import World, abort_all, find_comm

FINE, WRONG = 0, 1


def run_together(given: Config, as_json: bool, work: Callable[[World], int]) -> NoReturn:
    """Do the work of a command on all processes that run it, and end them with one exit code.

    Collective over COMM_WORLD under an MPI launcher or srun. Otherwise this process is alone.

    Args:
        given: settings.
        as_json: print an error as a JSON document on stdout, too.
        work: does the work and returns the exit code. The code of rank 0 counts. An MlflashError or ClickException
            must be the same on all ranks.
    """
    world: World | None = None
    try:
        world = World(find_comm(os.environ), given.ranks_per_node, given.timeout_s)
        world.start_job(_raise)
        world.connect()
        world.end_job()  # reading may take long, and the user who started the command sees its progress
        code = work(world)
    except (MlflashError, click.ClickException) as error:
        code = error.exit_code if isinstance(error, click.ClickException) else WRONG
        if world is None or world.rank == 0 or isinstance(error, DeadlineExceeded):
            _say_error(error, as_json)
        if isinstance(error, DeadlineExceeded):  # only this rank knows: the others may never arrive
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
    """End the other processes, too. They would wait for this one forever."""
    if world is not None and world.mpi is not None:
        abort_all(world.mpi, WRONG)
