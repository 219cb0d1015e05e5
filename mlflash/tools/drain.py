"""The command ``mlflash drain``."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import Any

import click

from ..config import Config
from ..drain.checkpoint_directory import Listed, list_checkpoints
from ..errors import MlflashError
from ..memory.node_directory import NodeDirectory
from ..memory.process_names import process_named
from ..storage.store import open_store
from .jobs import choose_job_here
from .options import job_options, settings
from .output import answer, progress_bar
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
    given = settings(memory, job, directory)
    name = choose_job_here(given, job)
    try:
        document = _ask(given, name, wait_s)
    except (MlflashError, OSError) as error:
        raise click.ClickException(str(error)) from error
    answer(as_json, document, _in_words(document, wait_s))
    context.exit(FINE if wait_s is None or document["heard" if directory is None else "drained"] else WRONG)


def _ask(given: Config, job: str, wait_s: float | None) -> dict[str, Any]:
    held, pid = _live(given.memory, job)
    before = set(_listed(given.directory))
    try:
        held.request_drain()
        document: dict[str, Any] = {"job": job, "pid": pid, "heard": False, "drained": None, "path": None}
        end = time.monotonic() + (wait_s or 0)
        with progress_bar("waiting for the drain") as update:
            while time.monotonic() < end:
                document["heard"] = not held.has_request()
                after = _listed(given.directory) if document["heard"] else []
                new = [listed for listed in after if listed not in before]
                if new or (document["heard"] and given.directory is None):
                    break
                update()
                time.sleep(_LOOK_S)
            else:
                new = []
    finally:
        held.close()
    if new:
        document |= {"drained": new[0].step, "path": f"{open_store(given.directory or '').path}/{new[0].folder}"}
    return document


def _live(memory: str, job: str) -> tuple[NodeDirectory, int]:
    """Return the directory of the job on this node, where it is alive, and one of its processes."""
    with contextlib.suppress(FileNotFoundError):
        held = NodeDirectory(memory, job, make=False)
        if (pid := held.alive()) is not None:
            return held, pid
        held.close()
    raise click.ClickException(f"no process of job {job} is alive on {socket.gethostname()}: use `mlflash scavenge` to "
                               "drain the newest checkpoint of a dead job")  # fmt: skip


def _listed(directory: str | None) -> list[Listed]:
    return [] if directory is None else list_checkpoints(open_store(directory))


def _in_words(document: dict[str, Any], wait_s: float | None) -> str:
    if wait_s is None:
        return f"job {document['job']} ({process_named(document['pid'])}) was asked to drain its next checkpoint"
    if document["drained"] is not None:
        return f"step {document['drained']} was drained to {document['path']}"
    if document["heard"]:
        return f"job {document['job']} has noticed the request and drains the checkpoint that it just committed"
    return f"job {document['job']} was asked to drain, but committed no checkpoint within {wait_s:g} s"
