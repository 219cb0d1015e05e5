"""The command ``mlflash list``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ..command_line.options import job_options, settings
from ..command_line.output import answer, new_table
from ..command_line.run_on_ranks import FINE, WRONG, run_together
from ..human_readable.units import show_seconds
from ..human_readable.wording import named
from ..inspection import on_disk
from ..inspection.restorability import Prospect, Restorability
from ..memory.slot_header import Verdict
from ..mpi.world import World
from .status import VALUES, attempt_to_json, look

if TYPE_CHECKING:
    from rich.console import Console


@click.command("list")
@job_options
def list_steps(directory: str | None, job: str | None, memory: str, as_json: bool) -> None:
    """List the checkpoints in memory and in the directory, newest first.

    Use it to see which steps you can go back to. Alone it looks at this node. Under srun or mpiexec it looks at all
    nodes that it was started on.

    \b
    mlflash list --directory /lustre/me/run42

    It changes nothing, and it reads only headers. `mlflash verify` reads every byte. Exits with 1 if nothing can be
    restored.
    """
    given = settings(memory, job, directory)

    def work(world: World) -> int:
        found = look(world, given, job, directory)
        if world.rank:
            return FINE
        outlook, stored = found.outlook, found.stored
        document = {
            "job": found.job,
            "memory": [attempt_to_json(one) for one in outlook.prospects],
            "unseen": list(outlook.unseen),
            "directory": None if stored is None else stored.to_json(),
        }
        answer(as_json, document, lambda console: _show(console, outlook, stored))
        something = outlook.newest is not None or bool(outlook.unseen and outlook.prospects)
        return FINE if something or (stored is not None and stored.newest is not None) else WRONG

    run_together(given, as_json, work)


def _show(console: Console, outlook: Restorability, stored: on_disk.DirectoryContents | None) -> None:
    rows: list[tuple[tuple[int, int], list[str]]] = []
    for one in outlook.prospects:
        state = VALUES.get(one.verdict, "") + _state(one, bool(outlook.unseen))
        row = [str(one.step), "memory", str(one.world_size), show_seconds(on_disk.age_s(one.unix_ns)), state]
        rows.append(((one.attempt.generation, 1), row))
    for listed in stored.listed if stored is not None else ():
        age, size = show_seconds(on_disk.age_s(listed.card.unix_ns)), str(listed.card.world_size)
        what = VALUES.get(listed.verdict, "") + listed.folder
        what += f", {_by_request(listed.step)}" if listed.verdict is Verdict.BAD else ""
        rows.append(((listed.card.attempt.generation, 0), [str(listed.step), "directory", size, age, what]))
    if not rows:
        console.print("nothing")
        return
    table = new_table(">step", "in", ">ranks", ">age", "what")
    for _, row in sorted(rows, key=lambda pair: pair[0], reverse=True):
        table.add_row(*row)
    console.print(table)


def _state(one: Prospect, unseen: bool) -> str:
    """Say whether a restore can take an attempt in memory."""
    seen = "committed" if one.committed else "no receipt of a commit"
    if one.choice is not None:
        can = _by_request(one.step) if one.verdict is Verdict.BAD else "can be restored"
        return f"{seen}, {can}" + (f" ({named(one.missing)} from parity)" if one.missing else "")
    if unseen:
        return f"{seen}, {named(one.missing)} not on this node"
    return f"{seen}, cannot be restored: " + (f"no slots of {named(one.missing)}" if one.missing else "a share is gone")


def _by_request(step: int) -> str:
    """Say when a restore takes a step that is marked bad: it passes over the step, unless it is asked for it."""
    return f"restored only if you ask for step {step}"
