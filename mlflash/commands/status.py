"""The command ``mlflash status``."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from ..command_line import choose_job
from ..command_line.options import job_options, settings
from ..command_line.output import answer, new_table
from ..command_line.run_on_ranks import FINE, WRONG, run_together
from ..config import Config
from ..human_readable.units import show_bytes, show_seconds
from ..human_readable.wording import many, named, ranges
from ..inspection import on_disk
from ..inspection.node_memory import File, Node, look_around
from ..inspection.restorability import Prospect, Restorability, Survival, survival, what_is_restorable
from ..memory.courier_process import process_named
from ..memory.slot_header import Attempt, Header, Kind, Verdict
from ..mpi.world import World

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

VALUES = {
    Verdict.CERTIFIED: "certified, ", Verdict.SUSPECT: "with suspect values, ", Verdict.BAD: "marked bad, ",
    Verdict.GOOD: "marked good, ",
}  # fmt: skip
"""What is known of the values of a step, as the first words of its description."""
_LOOKS = 5
_STUCK = 2  # restores of one attempt; from this number on the command mentions them


@click.command()
@job_options
def status(directory: str | None, job: str | None, memory: str, as_json: bool) -> None:
    """Show what is in memory, which losses it survives, and what was drained.

    Use it while a job runs, or after it died, before you start it again. Alone it looks at this node. Under srun or
    mpiexec it looks at all nodes that it was started on.

    \b
    mlflash status --directory /lustre/me/run42
    srun --ntasks-per-node=1 mlflash status --directory /lustre/me/run42

    It changes nothing, and it reads only the headers of the slots. Only `mlflash verify` reads every byte and knows
    whether a step can be loaded. Exits with 1 if a file is damaged, if a committed step is lost, or if nothing can be
    restored.
    """
    given = settings(memory, job, directory)

    def work(world: World) -> int:
        found = look(world, given, job, directory)
        if world.rank:
            return FINE
        answer(as_json, found.to_json(), found.show)
        return FINE if found.is_well else WRONG

    run_together(given, as_json, work)


def look(world: World, given: Config, job: str | None, directory: str | None) -> Found:
    """Look at the memory and the directory of a job. Collective over the world; only rank 0 gets what is in memory.

    A live job may commit a step between the looks at two of its files, which then seem to belong to a step that is
    lost. So a step is lost only if the next look finds the same.
    """
    name, before = choose_job.choose(world, given, job, directory), None
    for _ in range(_LOOKS):
        nodes = look_around(world, given.memory, name)
        outlook = what_is_restorable(nodes, world.world is not None)
        lost = None if outlook.lost is None else outlook.lost.attempt
        is_moving = lost is not None and lost != before and any(node.pid is not None for node in nodes)
        if not world.broadcast(is_moving, 0):
            break
        before = lost
    return Found(name, nodes, outlook, on_disk.look_into(world, given.directory), is_moving)


@dataclasses.dataclass
class Found:
    """All that the status of a job shows.

    Attributes:
        is_moving: whether the job commits so fast that each look finds another step that seems to be lost.
    """

    job: str
    nodes: list[Node]
    outlook: Restorability
    stored: on_disk.DirectoryContents | None
    is_moving: bool = False

    @property
    def is_well(self) -> bool:
        """Whether nothing is damaged, no committed step is lost, and there is something to restore."""
        if any(node.damaged for node in self.nodes) or (self.stored is not None and self.stored.damaged):
            return False
        if self.outlook.unseen:  # what is on other nodes is unknown
            return bool(self.outlook.prospects)
        drained = self.stored.newest if self.stored is not None else None
        lost = None if self.is_moving else self.outlook.lost
        if lost is not None and (drained is None or drained.card.attempt.generation < lost.attempt.generation):
            return False
        return self.outlook.newest is not None or drained is not None

    @property
    def survives(self) -> Survival | None:
        """The losses that the newest checkpoint in memory survives. None if other nodes were not looked at."""
        newest = self.outlook.newest
        return None if newest is None or self.outlook.unseen else survival(self.nodes, newest)

    def to_json(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        survives, newest = self.survives, self.outlook.newest
        return {
            "job": self.job,
            "alive": any(node.pid is not None for node in self.nodes),
            "well": self.is_well,
            "newest": None if newest is None else newest.step,
            "verified": False,  # headers tell what was saved, not what can be loaded
            "survives": None if survives is None else dataclasses.asdict(survives) | {"words": str(survives)},
            "unseen": list(self.outlook.unseen),
            "attempts": [attempt_to_json(one) for one in self.outlook.prospects],
            "nodes": [_node_to_json(node) for node in self.nodes],
            "directory": None if self.stored is None else self.stored.to_json(),
        }

    def show(self, console: Console) -> None:
        """Print all of it for people."""
        console.print(_nodes_table(self.nodes))
        for style, text in self._lines():
            console.print(text, style=style or None)

    def _lines(self) -> Iterator[tuple[str, str]]:
        alive = [node for node in self.nodes if node.pid is not None]
        where = f"{alive[0].name}, {process_named(alive[0].pid or 0)}" if alive else ""
        yield "", f"job {self.job}: " + (f"alive ({where})" if alive else "no live process here")
        if any(node.drain_asked for node in self.nodes):
            yield "", "a drain was requested: the job drains the next checkpoint that it commits"
        newest = self.outlook.newest
        if newest is not None:
            yield "", "in memory: " + describe(newest)
            if newest.restores >= _STUCK:
                yield "yellow", f"restored {newest.restores} times, and the job has committed nothing newer since"
        elif not self.outlook.unseen:
            yield "red", "in memory: nothing that can be restored"
        if self.outlook.unseen:
            names = ", ".join(self.outlook.unseen)
            yield "yellow", (f"not looked at: {names}. To see what all nodes together can restore and survive, start "
                             "this command under srun or mpiexec with a process on each node")  # fmt: skip
        elif (survives := self.survives) is not None:
            yield "red" if survives.fatal else "", f"survives the loss of: any process; {survives}"
        if newest is not None or (self.stored is not None and self.stored.newest is not None):
            yield "", "this is what the headers say: only `mlflash verify` reads every byte"
        if self.outlook.lost is not None and not self.outlook.unseen and not self.is_moving:
            yield "red", describe_lost(self.outlook.lost)
        for node in self.nodes:
            for file in node.damaged:
                yield "red", f"damaged: {file.name} on {node.name}: {file.damage}"
        yield from directory_lines(self.stored)


def directory_lines(stored: on_disk.DirectoryContents | None) -> Iterator[tuple[str, str]]:
    """Describe what was drained, for people. Yield style and text of each line."""
    if stored is None:
        yield "", "drained: not looked at; give --directory"
        return
    if stored.passed_over:
        bad = ", ".join(str(one.step) for one in stored.passed_over)
        yield "yellow", f"drained, but marked bad, and restored only if you ask for the step: {bad}"
    if stored.newest is None:
        yield "yellow", f"drained: nothing {'else ' if stored.passed_over else ''}in {stored.path}"
    else:
        steps = sorted({one.step for one in stored.listed})
        age = show_seconds(on_disk.age_s(stored.newest.card.unix_ns))
        yield "", f"drained: step {stored.newest.step}, {age} ago; {many(len(steps), 'step')} in {stored.path}"
    if stored.unfinished:
        yield "yellow", f"unfinished (a drain is writing them, or it died): {', '.join(stored.unfinished)}"
    if stored.damaged:
        yield "red", f"damaged: {', '.join(stored.damaged)}"


def describe(one: Prospect) -> str:
    """Describe an attempt that can be restored.

    Example:
        "step 40 of 4 ranks, committed, 12 s ago; xor:4; parity rebuilds ranks 2-3"
    """
    seen = "committed" if one.committed else "no receipt of a commit but complete"
    text = f"step {one.step} of {many(one.world_size, 'rank')}, {seen}, {VALUES.get(one.verdict, '')}"
    text += f"{show_seconds(on_disk.age_s(one.unix_ns))} ago; {one.scheme}"
    if one.missing:
        text += f"; parity rebuilds {named(one.missing)}"
    return text


def describe_lost(one: Prospect) -> str:
    """Describe an attempt that was committed and cannot be restored."""
    what = f"the slots of {named(one.missing)} are gone" if one.missing else "state that ranks share is gone"
    return f"step {one.step} was committed, but memory can no longer give it: {what}"


def attempt_to_json(one: Prospect) -> dict[str, Any]:
    """Return an attempt in memory as plain values."""
    return {
        "step": one.step,
        "generation": one.attempt.generation,
        "run": one.attempt.run_id.hex(),
        "ranks": one.world_size,
        "scheme": one.scheme,
        "age_s": on_disk.age_s(one.unix_ns),
        "committed": one.committed,
        "restorable": one.choice is not None,
        "restores": one.restores,
        "values": one.verdict.name.lower(),
        "nbytes": one.nbytes,
        "missing_ranks": list(one.missing),
    }


def _node_to_json(node: Node) -> dict[str, Any]:
    return {
        "node": node.name,
        "path": node.path,
        "pid": node.pid,
        "drain_asked": node.drain_asked,
        "nbytes": sum(file.nbytes for file in node.files),
        "files": [_file_to_json(file) for file in node.files],
    }


def _file_to_json(file: File) -> dict[str, Any]:
    header = file.header
    document: dict[str, Any] = {"file": file.name, "nbytes": file.nbytes, "damage": file.damage or None, "holds": None}
    if header is None:
        return document
    return document | {
        "holds": header.kind.name.lower(), "step": header.step, "rank": header.rank, "ranks": header.world_size,
        "generation": header.attempt.generation, "saved_on": header.node, "scheme": header.scheme,
        "group": list(header.group), "committed": file.committed, "restores": file.restores,
        "age_s": on_disk.age_s(header.unix_ns), "saved": time.strftime("%Y-%m-%dT%H:%M:%SZ",
                                                                      time.gmtime(header.unix_ns / 1e9)),
    }  # fmt: skip


def _nodes_table(nodes: Sequence[Node]) -> Table:
    """Make a table with a line for each node and step, newest first."""
    table = new_table("node", ">step", "slots of", "parity of", ">shares", ">size", ">age", "committed")
    for node in nodes:
        name = node.name
        for its in _by_attempt(node):
            headers = [header for _, header in its]
            ranks = {kind: [header.rank for header in headers if header.kind is kind] for kind in Kind}
            table.add_row(
                name, str(headers[0].step), ranges(ranks[Kind.SLOT]), ranges(ranks[Kind.PARITY]),
                str(len(ranks[Kind.SHARE]) or "-"), show_bytes(sum(file.nbytes for file, _ in its)),
                show_seconds(on_disk.age_s(max(header.unix_ns for header in headers))),
                "yes" if any(file.committed for file, _ in its) else "no receipt",
            )  # fmt: skip
            name = ""
        blank = [file for file in node.files if file.header is None and not file.damage]
        if blank or not node.files:
            what = "nothing" if not node.files else f"{len(blank)} {'being written or ' * (node.pid is not None)}free"
            size = show_bytes(sum(file.nbytes for file in blank)) if blank else "-"
            table.add_row(name, "-", what, "-", "-", size, "-", "-")
    return table


def _by_attempt(node: Node) -> list[list[tuple[File, Header]]]:
    """Group the sealed files of a node by attempt, newest first."""
    found: dict[Attempt, list[tuple[File, Header]]] = {}
    for file, header in node.sealed:
        found.setdefault(header.attempt, []).append((file, header))
    return [found[attempt] for attempt in sorted(found, key=lambda one: one.generation, reverse=True)]
