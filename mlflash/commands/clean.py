"""The command ``mlflash clean``."""

from __future__ import annotations

import json
from typing import Any

import click

from ..background_files.staged import leftovers
from ..command_line import shell_completion
from ..command_line.options import json_option, memory_option
from ..command_line.run_on_ranks import FINE, WRONG
from ..errors import JobInUse, MlflashError
from ..memory.courier_process import process_named
from ..memory.node_directory import NodeDirectory, emulated_nodes, jobs_of
from ..memory.node_directory import clean as clean_job


@click.command()
@click.argument("jobs", nargs=-1, metavar="[JOB]...", shell_complete=shell_completion.jobs)
@click.option("--all", "everything", is_flag=True, help="All jobs of this user on this node.")
@click.option("--dry-run", is_flag=True, help="Delete nothing, and say what would be.")
@memory_option
@json_option
@click.pass_context
def clean(context: click.Context, jobs: tuple[str, ...], everything: bool, dry_run: bool, memory: str,
          as_json: bool) -> None:  # fmt: skip
    """Delete what ended jobs hold in the memory of this node.

    Without a job it lists those that are there. A job that is alive is refused, and the exit code is 1 then.
    """
    there = jobs_of(memory)
    if unknown := sorted(set(jobs) - set(there)):
        raise click.ClickException(f"no memory of {', '.join(unknown)} here; there is: {', '.join(there) or 'none'}")
    wanted = there if everything else list(dict.fromkeys(jobs))
    listing = not wanted
    done = [_clean(memory, job, dry_run or listing) for job in (there if listing else wanted)]
    if as_json:
        click.echo(json.dumps({"dry_run": dry_run or listing, "jobs": done}, indent=1))
    elif listing:
        click.echo("\n".join(there) or "nothing of this user is in memory here")
    else:
        for one in done:
            text = one["error"] or f"{one['nbytes']:,} bytes {'would be ' * dry_run}freed"
            click.echo(f"{one['job']}: {text}", err=one["error"] is not None)
    context.exit(FINE if listing or not any(one["error"] for one in done) else WRONG)


def _clean(memory: str, job: str, dry_run: bool) -> dict[str, Any]:
    """Clean up after a job, or say what that would do."""
    found: dict[str, Any] = {"job": job, "nbytes": 0, "files": 0, "pid": None, "error": None}
    try:
        for node in (None, *emulated_nodes(memory, job)):
            _count(memory, job, node, found)
        if not dry_run:
            found["nbytes"] = clean_job(memory, job)
        elif found["pid"] is not None:
            raise JobInUse("a process of this job is alive", found=process_named(found["pid"]))
        found["nbytes"] += leftovers(memory, job, dry_run)
    except MlflashError as error:
        found["error"] = str(error)
    return found


def _count(memory: str, job: str, node: int | None, found: dict[str, Any]) -> None:
    """Count the slot files of a node."""
    try:
        held = NodeDirectory(memory, job, node, make=False)
    except FileNotFoundError:
        return
    try:
        found["pid"] = found["pid"] if found["pid"] is not None else held.alive()
        for name in held.slot_names():
            found["nbytes"] += held.nbytes(name)
            found["files"] += 1
    finally:
        held.close()
