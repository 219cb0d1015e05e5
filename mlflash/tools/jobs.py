"""The jobs that hold memory: which one a command works on, and the commands ``mlflash jobs`` and ``mlflash clean``."""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from ..config import Config, job_name
from ..errors import JobInUse, MlflashError
from ..framework_files.background_files import leftovers
from ..memory.node_directory import clean as clean_job
from ..memory.node_directory import jobs_of
from ..memory.process_names import process_named
from ..mpi.world import World, gather
from ..text import LIGHT, listed, many, show_bytes
from . import completion
from .node_memory import Node, look
from .options import json_option, memory_option
from .output import age_s, new_table, print_answer, show_age
from .run_on_ranks import FINE, WRONG

if TYPE_CHECKING:
    from rich.console import Console

_NAMED = 5  # jobs in an error message


def _look_at(memory: str, job: str) -> Node:
    """Look at what a job holds in the memory of this node, with its light saves. The result has the name of the job."""
    try:
        whole, light = look(memory, job, job), look(memory, job + LIGHT, job)
        return dataclasses.replace(whole, files=whole.files + light.files, pid=whole.pid or light.pid)
    except MlflashError as error:
        return Node(job, error=str(error))


def _to_json(job: Node) -> dict[str, Any]:
    newest = job.newest
    return {"job": job.name, "pid": job.pid, "nbytes": job.nbytes, "files": len(job.files), "error": job.error or None,
            "step": None if newest is None else newest.step,
            "age_s": None if newest is None else age_s(newest.unix_ns)}  # fmt: skip


# The job that a command works on


_Known = tuple[str, int, bool]
"""A job: its name, the time of its newest save in ns since 1970, and whether it is alive."""


def choose_job(world: World, given: Config, job: str | None, is_live: bool = True) -> str:
    """Choose the job: the named one, else the one of the directory, else the only one in memory, or the only live one.

    With ``is_live=False`` it takes the only dead one instead. Raises UsageError if several jobs remain. Collective.
    """
    nodes = gather(world, _jobs_here(given, job) if world.local_rank == 0 else [])
    chosen: str | click.ClickException
    try:
        chosen = _choose([known for of_node in nodes for known in of_node], given, job, is_live)
    except click.ClickException as error:
        chosen = error
    chosen = world.broadcast(chosen, 0)
    if isinstance(chosen, click.ClickException):
        raise chosen
    return chosen


def choose_job_here(given: Config, job: str | None) -> str:
    """Choose the job among those of this node. See `choose_job`."""
    return _choose(_jobs_here(given, job), given, job)


def _jobs_here(given: Config, name: str | None) -> list[_Known]:
    names = jobs_of(given.memory)
    if name or given.directory or len(names) < 2:  # the names are enough
        return [(name, 0, False) for name in names]
    jobs = [_look_at(given.memory, name) for name in names]
    return [(job.name, 0 if job.newest is None else job.newest.unix_ns, job.pid is not None) for job in jobs]


def _choose(known: Sequence[_Known], given: Config, job: str | None, is_live: bool = True) -> str:
    names = list(dict.fromkeys(name for name, *_ in sorted(known, key=lambda each: (-each[1], each[0]))))
    live = {name for name, _, lives in known if lives}
    preferred = live if is_live else set(names) - live
    return decide(names, os.environ, job, given.directory, given.memory, preferred)


def decide(names: Collection[str], env: Mapping[str, str], job: str | None, directory: str | None, memory: str,
           preferred: Collection[str] = ()) -> str:  # fmt: skip
    """Choose one of the jobs that have memory here.

    Args:
        job: the given name. With a directory, a job of this name need not have memory here.
        preferred: those of them of which the only one is taken, such as the live ones.

    Example:
        ``slurm-71-1c0d5a3e`` is the job of ``/lustre/me/run42``, also outside of Slurm job 71, because 1c0d5a3e is the
        hash of the directory.
    """
    if job:
        if job in names or directory:
            return job
        others = f"; jobs here: {listed(list(names), _NAMED)}" if names else ""
        raise click.ClickException(f"job {job} holds no memory in {memory} on {socket.gethostname()}{others}")
    if directory:
        name = job_name(env, directory)
        digest = job_name({}, directory).rpartition("-")[2]
        alike = sorted(other for other in names if other.endswith(f"-{digest}"))
        if name in names or not alike:
            return name
        if len(alike) == 1:
            return alike[0]
        raise click.UsageError(f"several jobs drain to {directory}: name one with --job: {listed(alike, _NAMED)}")
    if not names:
        host = socket.gethostname()
        raise click.ClickException(f"nothing of this user is in {memory} on {host}: log in to a node that the job ran "
                                   "on, or name another memory file system with --memory")  # fmt: skip
    for candidates in (names, preferred):
        if len(candidates) == 1:
            return next(iter(candidates))
    raise click.UsageError(f"which job? Name one with --job: {listed(list(names), _NAMED)}")


# The commands


@click.command()
@memory_option
@json_option
def jobs(memory: str, as_json: bool) -> None:
    """List the jobs of this user that hold memory on this node, with their sizes.

    `mlflash clean` frees the memory of those that have ended.
    """
    full = _full(memory, jobs_of(memory))
    document = {"memory": memory, "jobs": [_to_json(job) for job in full]}
    print_answer(as_json, document, lambda console: _show(console, full, memory))


def _full(memory: str, names: Iterable[str]) -> list[Node]:
    """Look at jobs. Those that hold something are returned, the largest first."""
    jobs = [_look_at(memory, name) for name in names]
    return sorted((job for job in jobs if job.nbytes or job.error or job.pid is not None), key=lambda job: -job.nbytes)


def _show(console: Console, full: Sequence[Node], memory: str) -> None:
    """Print a line for each job, and the sum of their bytes."""
    if not full:
        console.print(f"no job of this user holds memory in {memory} here")
        return
    table = new_table("job", ">size", ">files", ">newest step", ">saved", "process")
    for job in full:
        step, age = ("-", "-") if job.newest is None else (str(job.newest.step), f"{show_age(job.newest.unix_ns)} ago")
        alive = "no process is alive" if job.pid is None else f"alive: {process_named(job.pid)}"
        table.add_row(job.name, show_bytes(job.nbytes), str(len(job.files)), step, age, job.error or alive)
    console.print(table)
    console.print(f"{many(len(full), 'job')} of this user in {memory}: {show_bytes(sum(job.nbytes for job in full))}")


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
    names = jobs_of(memory)
    if unknown := sorted(set(jobs) - set(names)):
        raise click.ClickException(f"{memory} holds nothing of {', '.join(unknown)}; jobs here: "
                                   f"{', '.join(names) or 'none'}")  # fmt: skip
    if everything and names and not (yes or dry_run):
        _ask(_full(memory, names), memory)
    cleaned = [_clean(memory, job, dry_run) for job in (names if everything else dict.fromkeys(jobs))]
    if as_json:
        print_answer(True, {"dry_run": dry_run, "jobs": cleaned}, "")
    for job in () if as_json else cleaned:
        text = job["error"] or f"{job['nbytes']:,} bytes {'would be ' * dry_run}freed"
        click.echo(f"{job['job']}: {text}", err=job["error"] is not None)
    context.exit(WRONG if any(job["error"] for job in cleaned) else FINE)


def _ask(full: Sequence[Node], memory: str) -> None:
    """Ask whether the user means all jobs. Other people's jobs may be among them on a shared account."""
    if not sys.stdin.isatty():
        raise click.UsageError("--all deletes what every ended job of this user holds here: add --yes to confirm")
    print_answer(False, None, lambda console: _show(console, full, memory))
    click.confirm(f"These {many(len(full), 'job')} hold {show_bytes(sum(job.nbytes for job in full))}. Delete what the "
                  "ended ones hold? You cannot restore it afterwards", abort=True)  # fmt: skip


def _clean(memory: str, name: str, dry_run: bool) -> dict[str, Any]:
    job = _look_at(memory, name)
    document = _to_json(job)
    try:
        if job.error:
            return document
        if job.pid is not None:
            raise JobInUse("")
        if not dry_run:
            document["nbytes"] = clean_job(memory, name)
        document["nbytes"] += leftovers(memory, name, dry_run)
    except JobInUse:
        alive = _look_at(memory, name).pid or job.pid
        holder = f" ({process_named(alive)})" if alive else ""
        document["error"] = f"it is alive{holder}: end it first. Nothing of it was deleted"
    except MlflashError as error:
        document["error"] = str(error)
    return document
