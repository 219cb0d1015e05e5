"""The command ``mlflash completion``."""

from __future__ import annotations

import os
from pathlib import Path

import click
from click.shell_completion import get_completion_class

_SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(_SHELLS), required=False)
@click.pass_context
def completion(context: click.Context, shell: str | None) -> None:
    """Print the script with which SHELL completes commands, options, jobs, steps and schemes after TAB.

    Without SHELL it prints the script for the shell that $SHELL names. Run one of these lines once, and each new shell
    has it:

    \b
    bash:  echo 'eval "$(mlflash completion bash)"' >> ~/.bashrc
    zsh:   echo 'eval "$(mlflash completion zsh)"' >> ~/.zshrc     (after compinit)
    fish:  mlflash completion fish > ~/.config/fish/completions/mlflash.fish
    """
    name = shell or Path(os.environ.get("SHELL", "")).name
    script = get_completion_class(name)
    if name not in _SHELLS or script is None:
        raise click.UsageError(f"which shell? Name one: {', '.join(_SHELLS)}")
    click.echo(script(context.find_root().command, {}, "mlflash", "_MLFLASH_COMPLETE").source(), nl=False)
