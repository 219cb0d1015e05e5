"""The command ``mlflash``. Each of its commands is a module that is imported only when somebody calls the command."""

from __future__ import annotations

import difflib
import importlib
import platform
from typing import Any

import click
from click.shell_completion import CompletionItem

from .errors import pip_install
from .version import __version__

_COMMANDS = {
    "doctor": ("tools.doctor:doctor", "Check whether the cluster is ready for a job."),
    "plan": ("tools.plan:plan", "Compare redundancy schemes and compute how often to save."),
    "template": ("tools.template:template", "Write a batch script for Slurm and a training script."),
    "run": ("tools.run_job:run", "Start a job and restart it after a failure."),
    "move": ("tools.run_job:move", "Let the ranks of a running job leave a node."),
    "agent": ("tools.run_job:agent", "Keep couriers alive when a Slurm job step is killed."),
    "demo": ("tools.demo:demo", "Kill a node of a small training and compare the weights."),
    "bench": ("tools.bench:bench", "Measure saves and recoveries on these nodes for a report."),
    "status": ("tools.status:status", "Show what is in memory and which losses it survives."),
    "top": ("tools.top:top", "Watch a running job in the terminal."),
    "drain": ("tools.drain_request:drain", "Ask a live job to copy its next checkpoint to disk."),
    "report": ("tools.report:report", "Show on one HTML page what happened to a job."),
    "scavenge": ("tools.rescue:scavenge", "Copy the newest checkpoint of a dead job to disk."),
    "reprotect": ("tools.rescue:reprotect", "Make lost copies and parity of a dead job again."),
    "jobs": ("tools.jobs:jobs", "List the jobs that hold memory on this node."),
    "clean": ("tools.jobs:clean", "Free the memory that ended jobs hold on this node."),
    "list": ("tools.status:list_steps", "List the checkpoints in memory and in the directory."),
    "inspect": ("tools.inspect_step:inspect_step", "Show the tensors of a checkpoint and where they are."),
    "verify": ("tools.verify:verify", "Check every byte of all checkpoints against its checksum."),
    "mark": ("tools.mark:mark", "Mark a step as bad or good for later restores."),
    "export": ("tools.export:export", "Write a checkpoint in a stock format such as safetensors."),
    "import": ("tools.export:import_", "Make a checkpoint from what PyTorch DCP wrote."),
    "completion": ("tools.completion:completion", "Print the TAB completion script for your shell."),
}
"""The commands in the order of ``--help``. Each has its module and function, and one line that says what it does.

The lines stand here so that ``--help`` and shell completion need not import all commands. They have no commas, because
fish would cut them there.
"""
_SECTIONS = {"doctor": "Before a job", "status": "While a job runs", "report": "After a job",
             "list": "About one checkpoint", "completion": "Your shell"}  # fmt: skip
"""The headings of ``--help``, each with the first command below it."""


class _Late(click.Group):
    """A group that imports a command when somebody asks for it."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise click.ClickException(f"this needs PyTorch: {pip_install('torch')}") from error

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
        names, width = list(_COMMANDS), max(map(len, _COMMANDS))
        starts = [*map(names.index, _SECTIONS), len(names)]
        for heading, first, end in zip(_SECTIONS.values(), starts, starts[1:], strict=False):
            with formatter.section(heading):
                formatter.write_dl([(f"{name:{width}}", _COMMANDS[name][1]) for name in names[first:end]])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        fitting = {name: line for name, (_, line) in _COMMANDS.items() if name.startswith(incomplete)}
        items = [CompletionItem(name, help=line) for name, line in fitting.items()]
        return items + click.Command.shell_complete(self, ctx, incomplete)


def _versions(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    """Print the version alone on a line, then the versions of Python and the libraries. Load none of them."""
    if not wanted or context.resilient_parsing:
        return
    import importlib.metadata as metadata

    versions = [f"Python {platform.python_version()}"]
    for name in ("torch", "numpy", "mpi4py", "h5py"):
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            versions.append(f"no {name}")
    click.echo(f"mlflash {__version__}\n{', '.join(versions)}; `mlflash doctor` names the MPI library")
    context.exit()


@click.group(cls=_Late, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_versions,
              help="Show the versions and exit.")  # fmt: skip
def main() -> None:
    """Memory-first checkpoints for training on HPC clusters.

    Each command looks at a job from outside, rescues what a dead job left in memory, or prepares the next job.

    \b
    mlflash doctor                     before a job: are node, MPI and Slurm ready?
    mlflash status -d /lustre/me/run   while it runs: what would survive a failure?
    mlflash scavenge /lustre/me/run    after it died: copy its newest step to disk

    `mlflash COMMAND --help` explains a command and shows an example.
    """
