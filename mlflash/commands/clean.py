"""The command ``mlflash clean``."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from ..background_files.staged import leftovers
from ..command_line import shell_completion
from ..command_line.options import json_option, memory_option
from ..command_line.output import answer
from ..command_line.run_on_ranks import FINE, WRONG
from ..errors import JobInUse, MlflashError
from ..human_readable.units import show_bytes
from ..human_readable.wording import many
from ..memory.courier_process import process_named
from ..memory.node_directory import clean as clean_job
from ..memory.node_directory import jobs_of
from .jobs import Held, held, show


@click.command()
@click.argument("jobs", nargs=-1, metavar="[JOB]...", shell_complete=shell_completion.jobs)
@click.option("--all", "everything", is_flag=True, help="All jobs of this user on this node; asks before.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Delete nothing, and say what would be.")
@memory_option
@json_option
@click.pass_context
def clean(context: click.Context, jobs: tuple[str, ...], everything: bool, yes: bool, dry_run: bool, memory: str,
          as_json: bool) -> None:  # fmt: skip
    """Delete what ended jobs hold in the memory of this node.

    Without a job it lists those that are there, as `mlflash jobs` does. A job that is alive is refused, and the exit
    code is 1 then. What is deleted cannot be restored: the checkpoints of a job that waits in the queue are among it.
    """
    there = jobs_of(memory)
    if unknown := sorted(set(jobs) - set(there)):
        raise click.ClickException(f"no memory of {', '.join(unknown)} here; there is: {', '.join(there) or 'none'}")
    wanted = there if everything else list(dict.fromkeys(jobs))
    listing = not wanted
    found = [held(memory, job) for job in (there if listing else wanted)]
    if everything and not (yes or dry_run or listing):
        _ask(found, memory)
    done = [_clean(memory, one, dry_run or listing) for one in found]
    if as_json:
        click.echo(json.dumps({"dry_run": dry_run or listing, "jobs": done}, indent=1))
    elif listing:
        answer(False, None, lambda console: show(console, found, memory))
    else:
        for one in done:
            text = one["error"] or f"{one['nbytes']:,} bytes {'would be ' * dry_run}freed"
            click.echo(f"{one['job']}: {text}", err=one["error"] is not None)
    context.exit(FINE if listing or not any(one["error"] for one in done) else WRONG)


def _ask(found: list[Held], memory: str) -> None:
    """See that all jobs are meant: others of a shared account may be among them."""
    if not sys.stdin.isatty():
        raise click.UsageError("--all deletes what every ended job of this user holds here; add --yes if you mean it")
    answer(False, None, lambda console: show(console, found, memory))
    nbytes = sum(one.nbytes for one in found)
    click.confirm(f"Delete what those of these {many(len(found), 'job')} hold that have ended ({show_bytes(nbytes)} in "
                  "all)? It cannot be restored then", abort=True)  # fmt: skip


def _clean(memory: str, one: Held, dry_run: bool) -> dict[str, Any]:
    """Clean up after a job, or say what that would do."""
    found = one.to_json()
    if one.error:
        return found
    try:
        if not dry_run:
            found["nbytes"] = clean_job(memory, one.job)
        elif one.pid is not None:
            raise JobInUse("a process of this job is alive", found=process_named(one.pid))
        found["nbytes"] += leftovers(memory, one.job, dry_run)
    except MlflashError as error:
        found["error"] = str(error)
    return found
