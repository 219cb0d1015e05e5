"""The command ``mlflash``."""

from __future__ import annotations

import signal
import sys

import click

from .planning.command import plan
from .version import __version__


@click.group()
@click.version_option(__version__)
def main() -> None:
    """Memory-first checkpoints for training on HPC clusters."""


main.add_command(plan)


@main.command()
@click.argument("jobs", nargs=-1, metavar="[JOB]...")
@click.option("--all", "everything", is_flag=True, help="All jobs of this user on this node.")
@click.option("--memory", default="/dev/shm", show_default=True, envvar="MLFLASH_MEMORY", help="Memory file system.")
def clean(jobs: tuple[str, ...], everything: bool, memory: str) -> None:
    """Delete what ended jobs hold in the memory of this node.

    Without a job it lists those that are there. A job that is alive is refused.
    """
    from .errors import MlflashError
    from .node_memory import clean as clean_job
    from .node_memory import jobs_of

    there = jobs_of(memory)
    if unknown := sorted(set(jobs) - set(there)):
        raise click.ClickException(f"no memory of {', '.join(unknown)} here; there is: {', '.join(there) or 'none'}")
    if not jobs and not everything:
        click.echo("\n".join(there) or "nothing of this user is in memory here")
    refused = False
    for job in there if everything else jobs:
        try:
            click.echo(f"{job}: {clean_job(memory, job):,} bytes freed")
        except MlflashError as error:
            refused = True
            click.echo(f"{job}: {error}", err=True)
    sys.exit(int(refused))


@main.command()
@click.option("--steps", type=click.IntRange(3), default=20, show_default=True, help="Training steps.")
@click.option("--kill-step", type=click.IntRange(1), help="Step in which the node dies; before the last. [random]")
@click.option("--seed", type=int, help="Of training, and of the step, the node and the moment. [random]")
@click.option("--redundancy", type=click.Choice(["copy", "none"]), default="copy", show_default=True)
def demo(steps: int, kill_step: int | None, seed: int | None, redundancy: str) -> None:
    """Train a small GPT, kill a node, relaunch, and compare the bits.

    4 ranks on 2 emulated nodes train a GPT under DDP and save every 2 steps; one node is killed with SIGKILL and
    its memory deleted. The final weights, and all else that decides how training would go on, are compared with
    those of a run that nothing happened to. Exits with 1 where they differ.
    """
    from rich.console import Console

    from .demo.run import draw, run
    from .demo.training import DemoFailed
    from .errors import MlflashError

    if kill_step is not None and kill_step >= steps:
        raise click.BadParameter(f"must be before the last step, {steps}", param_hint="--kill-step")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the ranks must not outlive us
    try:
        same = run(draw(steps, seed, kill_step, redundancy), Console())
    except (DemoFailed, MlflashError) as error:
        raise click.ClickException(str(error)) from error
    sys.exit(0 if same else 1)
