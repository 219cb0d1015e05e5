"""The command ``mlflash demo``."""

from __future__ import annotations

import signal
import sys

import click


@click.command()
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

    from ..demo.one_launch import DemoFailed
    from ..demo.run import draw, run
    from ..errors import MlflashError

    if kill_step is not None and kill_step >= steps:
        raise click.BadParameter(f"must be before the last step, {steps}", param_hint="--kill-step")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the ranks must not outlive us
    try:
        same = run(draw(steps, seed, kill_step, redundancy), Console())
    except (DemoFailed, MlflashError) as error:
        raise click.ClickException(str(error)) from error
    sys.exit(0 if same else 1)
