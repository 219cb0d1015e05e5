"""Options that commands share, and what they say of the settings of a job."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import click

from .. import config
from ..config import Config
from ..errors import ConfigError
from . import shell_completion

job_option = click.option(
    "--job", envvar="MLFLASH_JOB", metavar="NAME", shell_complete=shell_completion.jobs,
    help="The job. [that of the directory, else the only one here]"
)  # fmt: skip
memory_option = click.option(
    "--memory", envvar="MLFLASH_MEMORY", default="/dev/shm", show_default=True,
    shell_complete=shell_completion.directories,
    help="Memory file system."
)  # fmt: skip
directory_option = click.option(
    "--directory", "-d", metavar="DIR", shell_complete=shell_completion.directories,
    help="Where the job drains to: a directory or a URL."
)  # fmt: skip
draining_option = click.option("--draining", is_flag=True, help="Count a further own slot for each rank.")
certify_after_option = click.option(
    "--certify-after", type=click.IntRange(0), default=0, metavar="STEPS",
    help="Count the slots that certify_after=STEPS holds besides. [0: none]"
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
