"""The command ``mlflash clean``."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from ..errors import JobInUse, MlflashError
from ..framework_files.staged import leftovers
from ..memory.courier_process import process_named
from ..memory.node_directory import clean as clean_job
from ..memory.node_directory import jobs_of
from ..text import many, show_bytes
from . import completion
from .node_memory import JobMemory, look_at_job
from .options import json_option, memory_option
from .output import answer
from .run_on_ranks import FINE, WRONG
from .status import job_to_json, show_jobs


@click.command()
@click.argument("jobs", nargs=-1, metavar="[JOB]...", shell_complete=completion.jobs)
@click.option("--all", "everything", is_flag=True,
              help="Take all jobs of this user on this node. Asks before it deletes.")  # fmt: skip
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Delete nothing. Only show what would be freed.")
@memory_option
@json_option
@click.pass_context
def clean(context: click.Context, jobs: tuple[str, ...], everything: bool, yes: bool, dry_run: bool, memory: str,
          as_json: bool) -> None:  # fmt: skip
    """Free the memory that ended jobs hold on this node. Their checkpoints in memory are lost.

    \b
    mlflash clean --all --dry-run
    mlflash clean run41-7c1d02aa

    `mlflash jobs` lists the jobs. It refuses a job that is alive.
    """
    if not (jobs or everything):
        raise click.UsageError("name the jobs, or give --all: `mlflash jobs` lists them")
    there = jobs_of(memory)
    if unknown := sorted(set(jobs) - set(there)):
        raise click.ClickException(f"{memory} holds nothing of {', '.join(unknown)}; jobs here: "
                                   f"{', '.join(there) or 'none'}")  # fmt: skip
    found = [look_at_job(memory, job) for job in (there if everything else dict.fromkeys(jobs))]
    if everything and found and not (yes or dry_run):
        _ask(found, memory)
    done = [_clean(memory, job, dry_run) for job in found]
    if as_json:
        click.echo(json.dumps({"dry_run": dry_run, "jobs": done}, indent=1))
    for job in () if as_json else done:
        text = job["error"] or f"{job['nbytes']:,} bytes {'would be ' * dry_run}freed"
        click.echo(f"{job['job']}: {text}", err=job["error"] is not None)
    context.exit(WRONG if any(job["error"] for job in done) else FINE)


def _ask(found: list[JobMemory], memory: str) -> None:
    """Ask whether the user means all jobs. Other people's jobs may be among them on a shared account."""
    if not sys.stdin.isatty():
        raise click.UsageError("--all deletes what every ended job of this user holds here: add --yes to confirm")
    answer(False, None, lambda console: show_jobs(console, found, memory))
    full = [job for job in found if not job.is_empty]
    nbytes = show_bytes(sum(job.node.nbytes for job in full))
    click.confirm(f"These {many(len(full), 'job')} hold {nbytes}. Delete what the ended ones hold? You cannot restore "
                  "it afterwards", abort=True)  # fmt: skip


def _clean(memory: str, job: JobMemory, dry_run: bool) -> dict[str, Any]:
    document = job_to_json(job)
    if job.error:
        return document
    try:
        if job.node.pid is not None:
            raise JobInUse("")
        if not dry_run:
            document["nbytes"] = clean_job(memory, job.job)
        document["nbytes"] += leftovers(memory, job.job, dry_run)
    except JobInUse:
        alive = look_at_job(memory, job.job).node.pid or job.node.pid
        holder = f" ({process_named(alive)})" if alive else ""
        document["error"] = f"it is alive{holder}: end it first. Nothing of it was deleted"
    except MlflashError as error:
        document["error"] = str(error)
    return document
