"""The command ``mlflash completion``, and the values that a shell completes. What cannot be read is left out."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import click
from click.shell_completion import CompletionItem, get_completion_class

from ..errors import MlflashError
from ..memory.node_directory import jobs_of
from ..storage.store import is_url

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


files = click.Path().shell_complete
directories = click.Path(file_okay=False).shell_complete
_SCHEMES = {
    "copy": "a copy of each slot on another node",
    "copy:2": "two copies of each slot on two other nodes",
    "xor:8": "survives the loss of any 1 node of 8",
    "rs:6+2": "survives the loss of any 2 nodes of 8",
    "rs:5+3": "survives the loss of any 3 nodes of 8",
    "none": "survives lost processes but no lost node",
}


def schemes(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Offer the schemes that the README names."""
    return [CompletionItem(name, help=text) for name, text in _SCHEMES.items() if name.startswith(incomplete)]


def jobs(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Offer the jobs that have memory on this node."""
    taken = context.params.get("jobs") or ()
    names = [name for name in _jobs(context.params.get("memory")) if name not in taken]
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


def steps(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Offer the steps in the memory of this node and in the directory, newest first."""
    places = dict.fromkeys(_steps_in_memory(context), "in memory")
    for step in _steps_in_directory(context.params.get("directory")):
        places[step] = "in memory and drained" if step in places else "drained"
    ordered = sorted(places.items(), reverse=True)
    return [CompletionItem(str(step), help=text) for step, text in ordered if str(step).startswith(incomplete)]


def steps_or_newest(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Offer "newest" and the steps."""
    newest = [CompletionItem("newest")] if "newest".startswith(incomplete) else []
    return newest + steps(context, parameter, incomplete)


def _jobs(memory: str | None) -> list[str]:
    try:
        return jobs_of(memory or "/dev/shm")
    except OSError:
        return []


def _steps_in_memory(context: click.Context) -> set[int]:
    """Return the steps in memory of the named job, else of all jobs."""
    from .node_memory import look

    memory, job, in_memory = context.params.get("memory"), context.params.get("job"), set[int]()
    for name in [job] if job else _jobs(memory):
        with contextlib.suppress(MlflashError, OSError):
            in_memory |= {header.step for _, header in look(memory or "/dev/shm", name, "").sealed}
    return in_memory


def _steps_in_directory(directory: str | None) -> set[int]:
    """Return the steps in a directory by the names of its folders. To open thousands of them would take too long."""
    if directory is None or is_url(directory):
        return set()
    from ..drain.checkpoint_directory import step_of

    try:
        return {step for path in Path(directory).iterdir() if (step := step_of(path.name)) is not None}
    except OSError:
        return set()
