"""The command ``mlflash``: each of its commands is a module of its own, and imports what it needs when it is called."""

from __future__ import annotations

import difflib
import importlib
import platform

import click
from click.shell_completion import CompletionItem

from .command_line.output import outlive_readers
from .version import __version__

_COMMANDS = {
    "run": ("commands.run:run", "Start the ranks of a job and again after a failure."),
    "status": ("commands.status:status", "Say what is in memory and what it survives."),
    "top": ("commands.top:top", "Watch the running job in the terminal."),
    "report": ("commands.report:report", "Tell from event logs what happened to a job in one page."),
    "list": ("commands.listing:list_steps", "List the checkpoints in memory and in the directory."),
    "inspect": ("commands.inspect_step:inspect_step", "Show the tensors of a checkpoint and where they lie."),
    "verify": ("commands.verify:verify", "Compare every byte with its checksum."),
    "mark": ("commands.mark:mark", "Say that a step is bad or good."),
    "drain": ("commands.drain:drain", "Ask the live job to drain its next checkpoint."),
    "scavenge": ("commands.rescue:scavenge", "Drain what the memory of a dead job can give."),
    "heal": ("commands.rescue:heal", "Make the redundancy in memory whole again."),
    "export": ("commands.export:export", "Write a checkpoint in a stock format such as safetensors."),
    "import": ("commands.export:import_", "Make a checkpoint of what PyTorch DCP wrote."),
    "jobs": ("commands.jobs:jobs", "List the jobs that hold memory on this node with their sizes."),
    "clean": ("commands.clean:clean", "Delete what ended jobs hold in the memory of this node."),
    "courier": ("commands.courier:courier", "Start couriers that outlive what kills their trainers."),
    "doctor": ("commands.doctor:doctor", "Say whether nodes and MPI and Slurm are as needed."),
    "template": ("commands.template:template", "Write a ready batch script for Slurm and its training."),
    "plan": ("commands.plan:plan", "Say what schemes cost and survive and how often to save."),
    "demo": ("commands.demo:demo", "Train a small GPT that loses a node and compare the bits."),
    "completion": ("commands.completion:completion", "Print what lets a shell complete all this after TAB."),
}
"""In the order in which ``--help`` lists them: module below ``mlflash`` and name in it, and what it does in one line.

The line stands here so that neither ``--help`` nor a shell that completes has to import them all; without commas, as
fish would cut it there.
"""


class _Late(click.Group):
    """A group whose commands are imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, name = _COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(f".{module}", __package__), name)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]
                        ) -> tuple[str | None, click.Command | None, list[str]]:  # fmt: skip
        alike = difflib.get_close_matches(args[0], _COMMANDS, 2)
        if alike and args[0] not in _COMMANDS and not ctx.resilient_parsing:
            ctx.fail(f"No such command {args[0]!r}. Did you mean {' or '.join(alike)}?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in _COMMANDS.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        fitting = {name: line for name, (_, line) in _COMMANDS.items() if name.startswith(incomplete)}
        found = [CompletionItem(name, help=line) for name, line in fitting.items()]
        return found + click.Command.shell_complete(self, ctx, incomplete)


def _versions(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    """Print the version alone on a line, then those of what it works with; nothing of it is loaded."""
    if not wanted or context.resilient_parsing:
        return
    import importlib.metadata as metadata

    found = [f"Python {platform.python_version()}"]
    for name in ("torch", "numpy", "mpi4py", "h5py"):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"no {name}")
    click.echo(f"mlflash {__version__}\n{', '.join(found)}; `mlflash doctor` names the MPI library")
    context.exit()


@click.group(cls=_Late, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_versions,
              help="Show the versions and exit.")  # fmt: skip
def main() -> None:
    """Memory-first checkpoints for training on HPC clusters."""
    outlive_readers()
