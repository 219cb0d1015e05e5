"""The command ``mlflash drain``."""

from __future__ import annotations

import contextlib
import socket
import time

import click

from ..drain.checkpoint_directory import Listed, list_checkpoints
from ..errors import MlflashError
from ..memory.node_directory import NodeDirectory
from ..memory.process_names import process_named
from ..storage.store import open_store
from .jobs import choose_job_here
from .options import job_options, settings
from .output import print_answer, progress_bar
from .run_on_ranks import FINE, WRONG

_LOOK_S = 0.1


@click.command()
@click.option("--wait", "wait_s", type=click.FloatRange(0, min_open=True), metavar="SECONDS",
              help="Wait at most this long until the checkpoint is in the directory. Without --directory, wait until "
              "the job has noticed the request.  [default: do not wait]")  # fmt: skip
@job_options
@click.pass_context
def drain(context: click.Context, wait_s: float | None, directory: str | None, job: str | None, memory: str,
          as_json: bool) -> None:  # fmt: skip
    """Ask the live job on this node to copy its next checkpoint to its directory.

    \b
    mlflash drain --wait 60 --directory /lustre/me/run42

    Start it on one node of the job, without mpiexec. Exits with 1 if no process of the job is alive here, or if the
    checkpoint was not drained in time.
    """
    config = settings(memory, job, directory)
    name = choose_job_here(config, job)
    try:
        with contextlib.closing(_live(config.memory, name)) as held:
            pid, before = held.alive(), set(_listed(config.directory))
            held.request_drain()
            is_heard, new = _wait(held, config.directory, before, wait_s or 0.0)
    except (MlflashError, OSError) as error:
        raise click.ClickException(str(error)) from error
    step = new.step if new is not None else None
    path = f"{open_store(directory or '').path}/{new.folder}" if new is not None else None
    if wait_s is None:
        words = f"job {name} ({process_named(pid or 0)}) was asked to drain its next checkpoint"
    elif new is not None:
        words = f"step {step} was drained to {path}"
    elif is_heard:
        words = f"job {name} has noticed the request and drains the checkpoint that it just committed"
    else:
        words = f"job {name} was asked to drain, but committed no checkpoint within {wait_s:g} s"
    print_answer(as_json, {"job": name, "pid": pid, "heard": is_heard, "drained": step, "path": path}, words)
    context.exit(FINE if wait_s is None or (is_heard if directory is None else new is not None) else WRONG)


def _wait(held: NodeDirectory, directory: str | None, before: set[Listed], wait_s: float) -> tuple[bool, Listed | None]:
    """Wait until the job has noticed the request, and has drained to the directory if there is one."""
    end, is_heard = time.monotonic() + wait_s, False
    with progress_bar("waiting for the drain") as update:
        while time.monotonic() < end:
            is_heard = not held.has_request()
            new = [listed for listed in _listed(directory) if listed not in before] if is_heard else []
            if new or (is_heard and directory is None):
                return True, new[0] if new else None
            update()
            time.sleep(_LOOK_S)
    return is_heard, None


def _live(memory: str, job: str) -> NodeDirectory:
    """Open the directory of the job on this node, where it is alive."""
    with contextlib.suppress(FileNotFoundError):
        held = NodeDirectory(memory, job, make=False)
        if held.alive() is not None:
            return held
        held.close()
    raise click.ClickException(f"no process of job {job} is alive on {socket.gethostname()}: use `mlflash scavenge` to "
                               "drain the newest checkpoint of a dead job")  # fmt: skip


def _listed(directory: str | None) -> list[Listed]:
    return [] if directory is None else list_checkpoints(open_store(directory))
