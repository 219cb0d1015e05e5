"""The command ``mlflash``."""

from __future__ import annotations

import click

from .version import __version__


@click.group()
@click.version_option(__version__)
def main() -> None:
    """Memory-first checkpoints for training on HPC clusters."""
