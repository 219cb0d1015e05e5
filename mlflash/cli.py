"""The command ``mlflash``: each of its commands is a module of its own, and imports what it needs when it is called."""

from __future__ import annotations

import importlib

import click

from .version import __version__

_COMMANDS = {
    "run": "running.command:run",
    "status": "commands.status:status",
    "list": "commands.listing:list_steps",
    "inspect": "commands.inspect_step:inspect_step",
    "verify": "commands.verify:verify",
    "drain": "commands.drain:drain",
    "scavenge": "commands.rescue:scavenge",
    "heal": "commands.rescue:heal",
    "export": "exports.command:export",
    "import": "exports.command:import_",
    "clean": "commands.clean:clean",
    "doctor": "commands.doctor:doctor",
    "plan": "planning.command:plan",
    "report": "reporting.command:report",
    "demo": "commands.demo:demo",
}
"""In the order in which ``--help`` lists them: module below ``mlflash``, and what it calls the command."""


class _Late(click.Group):
    """A group whose commands are imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, name = _COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(f".{module}", __package__), name)
        return command


@click.group(cls=_Late)
@click.version_option(__version__)
def main() -> None:
    """Memory-first checkpoints for training on HPC clusters."""
