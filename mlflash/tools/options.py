"""The options that commands share, and the settings that follow from them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import click

from .. import config
from ..config import Config
from ..errors import ConfigError
from ..text import read_bytes, read_seconds
from . import completion


def _quantity(read: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    def callback(_: click.Context, option: click.Parameter, text: str | None) -> Any:
        try:
            return None if text is None else read(text)
        except ConfigError as error:
            raise click.BadParameter(str(error), param=option) from None

    return callback


BYTES, SECONDS = _quantity(read_bytes), _quantity(read_seconds)  # callbacks of options: "12GiB", "30min"

job_option = click.option(
    "--job", envvar="MLFLASH_JOB", metavar="NAME", shell_complete=completion.jobs,
    help="Name of the job.  [default: the job of --directory, else the only one here]"
)  # fmt: skip
memory_option = click.option(
    "--memory", envvar="MLFLASH_MEMORY", default="/dev/shm", show_default=True,
    shell_complete=completion.directories,
    help="Memory file system that holds the slots."
)  # fmt: skip
directory_option = click.option(
    "--directory", "-d", metavar="DIR", shell_complete=completion.directories,
    help="Directory or URL that the job drains to."
)  # fmt: skip
draining_option = click.option("--draining", is_flag=True,
              help="Count one more slot per rank, as a job that drains needs it.")  # fmt: skip
certify_after_option = click.option(
    "--certify-after", type=click.IntRange(0), default=0, metavar="STEPS",
    help="Count the additional slots of a job with certify_after=STEPS.  [default: none]"
)  # fmt: skip
history_option = click.option(
    "--history", type=click.IntRange(0), default=0, metavar="N",
    help="Count the additional slots of a job with history=N.  [default: none]"
)  # fmt: skip
light_option = click.option(
    "--light", type=click.IntRange(0), default=0, metavar="N",
    help="Count the additional slots of a job with light=N.  [default: none]"
)  # fmt: skip
gradients_option = click.option(
    "--gradients", callback=BYTES, metavar="SIZE",
    help="Gradients of one rank, for --light.  [default: a third of the state, as AdamW has in one precision]"
)  # fmt: skip
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


def job_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options that choose the job, and --json."""
    return directory_option(job_option(memory_option(json_option(command))))


def settings(memory: str | None, job: str | None, directory: str | None) -> Config:
    """Read the settings of a job from options and environment, as a Checkpointer would.

    Commands ignore MLFLASH_DISABLE, which turns off checkpoints of a training.
    """
    os.environ.pop(config.DISABLE, None)
    try:
        # Without a given name any name will do: `jobs.choose_job` chooses the job later.
        return config.from_environment(os.environ, directory, job=job or "any", memory=memory, drain_every=0)
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
