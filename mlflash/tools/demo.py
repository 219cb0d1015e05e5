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

    It needs no GPU, no cluster and no Slurm. 4 ranks on 2 emulated nodes train under DDP. With --keep-alive, 2 ranks
    train under `mlflash run --keep-alive`, and a process that waits takes the place of a killed one. Exits with 1 if
    the weights differ from those of an undisturbed run.
    """
    from rich.console import Console

    from ..errors import MlflashError
    from .demo_run import Demo

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
