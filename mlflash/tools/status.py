"""The commands ``mlflash status`` and ``mlflash list``: what memory and the directory hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from ..config import Config
from ..memory.process_names import process_named
from ..memory.slot import Attempt, Header, Kind, Verdict
from ..mpi.world import World
from ..text import LIGHT, many, named, ranges, show_bytes
from . import on_disk
from .jobs import choose_job
from .node_memory import File, Node, Prospect, Restorability, Survival, look_around, survival, what_is_restorable
from .options import job_options
from .output import new_table, show_age
from .run_on_ranks import Answer, together

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_VALUES = {
    Verdict.CERTIFIED: "certified, ", Verdict.SUSPECT: "suspect values, ", Verdict.BAD: "marked bad, ",
    Verdict.GOOD: "marked good, ",
}  # fmt: skip
"""What is known of the values of a step, as the first words of its description."""
_LOOKS = 5
_STUCK = 2  # restores of one attempt; from this number on the command mentions them


@click.command()
@job_options
@together
def status(world: World, config: Config, job: str | None) -> Answer | None:
    """Show what is in memory, which losses it survives, and what was drained.

    \b
    mlflash status --directory /lustre/me/run42
    srun --ntasks-per-node=1 mlflash status --directory /lustre/me/run42

    Alone it looks at this node. It reads only headers: only `mlflash verify` reads every byte. Exits with 1 if a file
    is damaged, if a committed step is lost, or if nothing can be restored.
    """
    state = look(world, config, job)
    return None if world.rank else Answer(state.is_well, state.to_json(), state.show)


@click.command("list")
@job_options
@together
def list_steps(world: World, config: Config, job: str | None) -> Answer | None:
    """List the checkpoints in memory and in the directory, newest first.

    \b
    mlflash list --directory /lustre/me/run42

    It looks where `mlflash status` looks. Exits with 1 if nothing can be restored.
    """
    state = look(world, config, job)
    if world.rank:
        return None
    document = state.to_json()
    is_well = state.taken is not None or bool(state.outlook.unseen and state.outlook.prospects)
    return Answer(is_well, {"job": state.job, "memory": document["attempts"], "unseen": document["unseen"],
                            "directory": document["directory"]}, state.show_steps)  # fmt: skip


# The state of a job


@dataclasses.dataclass
class JobState:
    """What memory and the directory hold of a job."""

    job: str
    nodes: list[Node]
    outlook: Restorability
    stored: on_disk.DirectoryContents | None
    light: list[int] = dataclasses.field(default_factory=list)  # newer steps that were saved lightly
    is_moving: bool = False  # whether the job commits so fast that each look finds another step that seems to be lost

    @property
    def lost(self) -> Prospect | None:
        """A committed step that these nodes cannot give. None if it may be on other nodes, or not be lost."""
        return None if self.is_moving or self.outlook.unseen else self.outlook.lost

    @property
    def is_well(self) -> bool:
        if any(node.damaged for node in self.nodes) or (self.stored is not None and self.stored.damaged):
            return False
        if self.outlook.unseen:  # what is on other nodes is unknown
            return bool(self.outlook.prospects)
        lost, drained = self.lost, self.drained
        is_lost = lost is not None and (drained is None or drained.generation < lost.attempt.generation)
        return not is_lost and self.taken is not None

    @property
    def taken(self) -> Attempt | None:
        """The attempt that a restore takes, as far as these nodes and the directory tell."""
        attempts = [self.outlook.newest.attempt] if self.outlook.newest is not None else []
        attempts += [self.drained] if self.drained is not None else []
        return max(attempts, key=lambda attempt: attempt.generation, default=None)

    @property
    def drained(self) -> Attempt | None:
        newest = None if self.stored is None else self.stored.newest
        return None if newest is None else newest.card.attempt

    @property
    def survives(self) -> Survival | None:
        """The losses that the newest checkpoint in memory survives. None if other nodes were not looked at."""
        newest = self.outlook.newest
        return None if newest is None or self.outlook.unseen else survival(self.nodes, newest)

    @property
    def light_words(self) -> str:
        return f"light saves after it, which a restore makes again: {ranges(self.light)}"

    def to_json(self) -> dict[str, Any]:
        survives, newest = self.survives, self.outlook.newest
        return {
            "job": self.job, "alive": any(node.pid is not None for node in self.nodes), "well": self.is_well,
            "newest": None if newest is None else newest.step, "light": self.light,
            "verified": False,  # headers tell what was saved, not what can be loaded
            "survives": None if survives is None else dataclasses.asdict(survives) | {"words": str(survives)},
            "unseen": list(self.outlook.unseen), "attempts": [each.to_json() for each in self.outlook.prospects],
            "nodes": [node.to_json() for node in self.nodes],
            "directory": None if self.stored is None else self.stored.to_json(),
        }  # fmt: skip

    def show(self, console: Console) -> None:
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
            yield "", f"redundancy: {newest.scheme}"
            if newest.restores >= _STUCK:
                yield "yellow", f"restored {newest.restores} times, and the job has committed nothing newer since"
            if self.light:
                yield "", self.light_words
        elif not self.outlook.unseen:
            yield "red", "in memory: nothing that can be restored"
        if self.outlook.unseen:
            names = ", ".join(self.outlook.unseen)
            yield "yellow", (f"not looked at: {names}. To see what all nodes together can restore and survive, start "
                             "this command under srun or mpiexec with a process on each node")  # fmt: skip
        elif (survives := self.survives) is not None:
            yield "red" if survives.fatal else "", f"survives the loss of: any process; {survives}"
        if self.lost is not None:
            yield "red", describe_lost(self.lost)
        for node in self.nodes:
            for file in node.damaged:
                yield "red", f"damaged: {file.name} on {node.name}: {file.damage}"
        yield from self._lines_of_directory()
        if not self.is_well:
            yield "yellow", "this is what the headers say: only `mlflash verify` reads every byte"

    def _lines_of_directory(self) -> Iterator[tuple[str, str]]:
        stored = self.stored
        if stored is None:
            yield "", "drained: not looked at; give --directory"
            return
        if stored.passed_over:
            bad = ", ".join(str(listed.step) for listed in stored.passed_over)
            yield "yellow", f"drained, but marked bad, and restored only if you ask for the step: {bad}"
        if stored.newest is None:
            missing = ", which does not exist" if stored.is_missing else ""
            yield "yellow", f"drained: nothing {'else ' if stored.passed_over else ''}in {stored.path}{missing}"
        else:
            count, age = len({listed.step for listed in stored.listed}), show_age(stored.newest.card.unix_ns)
            yield "", f"drained: step {stored.newest.step}, {age} ago; {many(count, 'step')} in {stored.path}"
        if stored.unfinished:
            yield "yellow", f"unfinished (a drain is writing them, or it died): {', '.join(stored.unfinished)}"
        if stored.damaged:
            yield "red", f"damaged: {', '.join(stored.damaged)}"

    def show_steps(self, console: Console) -> None:
        unseen = bool(self.outlook.unseen)
        lines = [(attempt.attempt, attempt.choice is not None, attempt.step, "memory", attempt.world_size,
                  attempt.unix_ns, _VALUES.get(attempt.verdict, "") + _can_be_restored(attempt, unseen))
                 for attempt in self.outlook.prospects]  # fmt: skip
        for listed in () if self.stored is None else self.stored.listed:
            card, bad = listed.card, f", {_by_request(listed.step)}" if listed.verdict is Verdict.BAD else ""
            what = f"{_VALUES.get(listed.verdict, '')}{listed.folder}{bad}"
            lines.append((card.attempt, True, listed.step, "directory", card.world_size, card.unix_ns, what))
        if not lines:
            console.print("nothing")
            return
        table, taken = new_table(">step", "in", ">ranks", ">age", "what"), None if unseen else self.taken
        lines.sort(key=lambda line: (line[0].generation, line[3] == "memory"), reverse=True)
        for attempt, is_whole, step, place, ranks, unix_ns, what in lines:
            if is_whole and attempt == taken:  # memory, if the directory has it, too
                what, taken = f"{what}; a restore takes this", None
            table.add_row(str(step), place, str(ranks), show_age(unix_ns), what)
        console.print(table)
        if self.light:
            console.print(self.light_words)


def look(world: World, config: Config, job: str | None) -> JobState:
    """Look at the memory and the directory of a job. Collective over the world; only rank 0 gets what is in memory.

    A live job may commit a step between the looks at two of its files, which then seem to belong to a step that is
    lost. So a step is lost only if the next look finds the same.
    """
    name, before = choose_job(world, config, job), None
    for _ in range(_LOOKS):
        nodes = look_around(world, config.memory, name)
        outlook = what_is_restorable(nodes, world.world is not None)
        lost = None if outlook.lost is None else outlook.lost.attempt
        is_moving = lost is not None and lost != before and any(node.pid is not None for node in nodes)
        if not world.broadcast(is_moving, 0):
            break
        before = lost
    light = what_is_restorable(look_around(world, config.memory, name + LIGHT), world.world is not None)
    newest = -1 if outlook.newest is None else outlook.newest.step
    steps = sorted({each.step for each in light.prospects if each.choice is not None and each.step > newest})
    return JobState(name, nodes, outlook, on_disk.look_into(world, config.directory), steps, is_moving)


# In words


def describe(attempt: Prospect) -> str:
    """Describe an attempt that can be restored.

    Example:
        "step 40 of 4 ranks, committed, 12 s ago; parity rebuilds ranks 2-3"
    """
    seen = "committed" if attempt.committed else "no receipt of a commit but complete"
    text = f"step {attempt.step} of {many(attempt.world_size, 'rank')}, {seen}, {_VALUES.get(attempt.verdict, '')}"
    text += f"{show_age(attempt.unix_ns)} ago"
    return text + (f"; parity rebuilds {named(attempt.missing)}" if attempt.missing else "")


def describe_lost(attempt: Prospect) -> str:
    """Describe an attempt that was committed and cannot be restored."""
    what = f"the slots of {named(attempt.missing)} are gone" if attempt.missing else "state that ranks share is gone"
    return f"step {attempt.step} was committed, but memory can no longer give it: {what}"


def _can_be_restored(attempt: Prospect, unseen: bool) -> str:
    seen = "committed" if attempt.committed else "no receipt of a commit"
    if attempt.choice is not None:
        can = _by_request(attempt.step) if attempt.verdict is Verdict.BAD else "can be restored"
        return f"{seen}, {can}" + (f" ({named(attempt.missing)} from parity)" if attempt.missing else "")
    if unseen:
        return f"{seen}, {named(attempt.missing)} not on this node"
    why = f"no slots of {named(attempt.missing)}" if attempt.missing else "a share is gone"
    return f"{seen}, cannot be restored: {why}"


def _by_request(step: int) -> str:
    return f"restored only if you ask for step {step}"


def _nodes_table(nodes: Sequence[Node]) -> Table:
    table = new_table("node", ">step", "slots of", "parity of", ">shares", ">size", ">age", "committed")
    for node in nodes:
        name = node.name
        for sealed in _by_attempt(node):
            headers = [header for _, header in sealed]
            ranks = {kind: [header.rank for header in headers if header.kind is kind] for kind in Kind}
            table.add_row(
                name, str(headers[0].step), ranges(ranks[Kind.SLOT]), ranges(ranks[Kind.PARITY]),
                str(len(ranks[Kind.SHARE]) or "-"), show_bytes(sum(file.nbytes for file, _ in sealed)),
                show_age(max(header.unix_ns for header in headers)),
                "yes" if any(file.committed for file, _ in sealed) else "no receipt",
            )  # fmt: skip
            name = ""
        blank = [file for file in node.files if file.header is None and not file.damage]
        if blank or not node.files:
            what = "nothing" if not node.files else f"{len(blank)} {'being written or ' * (node.pid is not None)}free"
            size = show_bytes(sum(file.nbytes for file in blank)) if blank else "-"
            table.add_row(name, "-", what, "-", "-", size, "-", "-")
    return table


def _by_attempt(node: Node) -> list[list[tuple[File, Header]]]:
    groups: dict[Attempt, list[tuple[File, Header]]] = {}
    for file, header in node.sealed:
        groups.setdefault(header.attempt, []).append((file, header))
    return [groups[attempt] for attempt in sorted(groups, key=lambda attempt: attempt.generation, reverse=True)]
