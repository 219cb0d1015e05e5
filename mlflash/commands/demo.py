"""The command ``mlflash demo``."""

from __future__ import annotations

import signal
import sys

import click

_KEPT_FROM = 4  # steps


@click.command()
@click.option("--keep-alive", is_flag=True, help="Kill one rank, and have the other process stay.")
@click.option("--steps", type=click.IntRange(3), default=20, show_default=True, help="Training steps.")
@click.option("--kill-step", type=click.IntRange(1), help="Step in which it dies; before the last. [random]")
@click.option("--seed", type=int, help="Of training, and of what dies when. [random]")
@click.option("--redundancy", type=click.Choice(["copy", "none"]), default="copy", show_default=True)
def demo(keep_alive: bool, steps: int, kill_step: int | None, seed: int | None, redundancy: str) -> None:
    """Train a small GPT, kill a node, relaunch, and compare the bits.

    4 ranks on 2 emulated nodes train a GPT under DDP and save every 2 steps; one node is killed with SIGKILL and
    its memory deleted. The final weights, and all else that decides how training would go on, are compared with
    those of a run that nothing happened to. Exits with 1 where they differ.

    With --keep-alive 2 ranks train under `mlflash run --keep-alive`, and a third process waits. One rank is killed; the
    other process stays, the third takes the lost rank, and all go on after the newest committed step.
    """
    from rich.console import Console

    from ..demo.one_launch import DemoFailed
    from ..demo.plan import draw
    from ..demo.run import run
    from ..errors import MlflashError

    if kill_step is not None and kill_step >= steps:
        raise click.BadParameter(f"must be before the last step, {steps}", param_hint="--kill-step")
    if keep_alive and (steps < _KEPT_FROM or (kill_step or _KEPT_FROM) < _KEPT_FROM):
        raise click.UsageError(
            f"--keep-alive: --steps and --kill-step are at least {_KEPT_FROM}, as step 2 is the first that is saved"
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the ranks must not outlive us
    try:
        same = run(draw(steps, seed, kill_step, redundancy, keep_alive), Console())
    except (DemoFailed, MlflashError) as error:
        raise click.ClickException(str(error)) from error
    sys.exit(0 if same else 1)
