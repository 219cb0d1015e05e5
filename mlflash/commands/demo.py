"""The command ``mlflash demo``."""

from __future__ import annotations

import signal
import sys

import click

_KEPT_FROM = 4  # steps


@click.command()
@click.option("--keep-alive", is_flag=True, help="Kill one rank, while the other process stays alive.")
@click.option("--steps", type=click.IntRange(3), default=20, show_default=True, help="Number of training steps.")
@click.option("--kill-step", type=click.IntRange(1), help="Step of the kill, before the last step.  [default: random]")
@click.option("--seed", type=int, help="Seed of the training and of the kill.  [default: random]")
@click.option("--redundancy", type=click.Choice(["copy", "none"]), default="copy", show_default=True,
              help="Redundancy scheme.")  # fmt: skip
def demo(keep_alive: bool, steps: int, kill_step: int | None, seed: int | None, redundancy: str) -> None:
    """Train a small GPT, kill a node, relaunch, and compare the weights bit for bit.

    Use it to see a recovery on your own machine. It needs no GPU, no cluster and no Slurm.

    \b
    mlflash demo
    mlflash demo --keep-alive

    4 ranks on 2 emulated nodes train a GPT under DDP and save every 2 steps. The demo kills one node with
    SIGKILL and deletes its memory. It compares the final weights, and everything else that decides how training would
    continue, with an undisturbed run. Exits with 1 if they differ.

    With --keep-alive, 2 ranks train under `mlflash run --keep-alive` while a third process waits. The demo kills one
    rank. The other process stays, the third process takes the lost rank, and both continue after the newest committed
    step.
    """
    from rich.console import Console

    from ..demo.run import Demo
    from ..errors import MlflashError

    if kill_step is not None and kill_step >= steps:
        raise click.BadParameter(f"must be before the last step, {steps}", param_hint="--kill-step")
    if keep_alive and (steps < _KEPT_FROM or (kill_step or _KEPT_FROM) < _KEPT_FROM):
        raise click.UsageError(
            f"--keep-alive needs --steps and --kill-step of at least {_KEPT_FROM}, because step 2 is the first save"
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the ranks must not outlive us
    try:
        same = Demo(steps, seed, kill_step, redundancy, keep_alive).run(Console())
    except MlflashError as error:
        raise click.ClickException(str(error)) from error
    sys.exit(0 if same else 1)
