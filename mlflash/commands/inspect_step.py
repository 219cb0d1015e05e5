"""The command ``mlflash inspect``."""

from __future__ import annotations

import click

from ..command_line import choose_job, shell_completion
from ..command_line.options import job_options, settings
from ..command_line.output import answer
from ..command_line.run_on_ranks import FINE, run_together
from ..config import Config
from ..errors import CorruptSlot, MlflashError
from ..human_readable.units import show_seconds
from ..inspection import checkpoint_contents, on_disk
from ..inspection.checkpoint_contents import Contents, Itinerary
from ..inspection.node_memory import Node, look, look_around, places
from ..inspection.provenance_check import Found
from ..inspection.restorability import Prospect, Restorability, what_is_restorable
from ..inspection.slot_file import Changed
from ..mpi.gather_on_rank_0 import gather
from ..mpi.world import World
from ..storage.store import open_store
from .contents_view import Shown, show, to_json


@click.command("inspect")
@click.argument("step", type=click.IntRange(0), shell_complete=shell_completion.steps)
@click.argument("tensor", required=False)
@click.option("--from", "source", type=click.Choice(["memory", "directory"]),
              help="Where to look.  [default: memory, then the directory]")  # fmt: skip
@job_options
def inspect_step(step: int, tensor: str | None, source: str | None, directory: str | None, job: str | None,
                 memory: str, as_json: bool) -> None:  # fmt: skip
    """Show the tensors of the checkpoint of STEP: names, dtypes, shapes and sizes.

    Use it to see what a checkpoint holds, or to look for NaN. With TENSOR it also shows statistics, and where each
    byte of the tensor is. TENSOR is a name, or a pattern such as "model.*.weight".

    \b
    mlflash inspect 40
    mlflash inspect 40 "model.*.weight" --directory /lustre/me/run42

    It changes nothing, and the job may be alive. Exits with 1 if there is no such step or tensor.
    """
    given = settings(memory, job, directory)
    if source == "directory" and directory is None:
        raise click.UsageError("--from directory needs --directory")

    def work(world: World) -> int:
        name = choose_job.choose(world, given, job, directory)
        shown = None if source == "directory" else _from_memory(world, given, name, step, tensor)
        if shown is None and source != "memory":
            shown = _from_directory(world, given.directory, step, tensor)
        if shown is None:
            raise click.ClickException(f"there is no step {step} in {source or 'memory or the directory'}"
                                       + ("" if directory else " (no --directory was given)"))  # fmt: skip
        if world.rank:
            return FINE
        answer(as_json, to_json(shown), lambda console: show(console, shown, tensor is not None))
        return FINE

    run_together(given, as_json, work)


def _from_memory(world: World, given: Config, job: str, step: int, tensor: str | None) -> Shown | None:
    """Read a step from memory. All ranks learn whether it is there; rank 0 gets what it holds. Collective."""
    nodes = look_around(world, given.memory, job)
    plan: tuple[Prospect, Itinerary] | None = None
    if world.rank == 0:
        outlook: Restorability = what_is_restorable(nodes, world.world is not None)
        one = checkpoint_contents.attempt_to_show(outlook.prospects, step)
        plan = None if one is None else (one, checkpoint_contents.plan(nodes, one))
    plan = world.broadcast(plan, 0)
    if plan is None:
        return None
    one, way = plan
    mine, error = Contents(), None
    if world.local_rank == 0:
        try:
            here: list[Node] = [look(given.memory, job, *place) for place in places(world, given.memory, job)]
            mine = checkpoint_contents.read_memory(given.memory, job, here, way, tensor, tensor is not None)
        except (Changed, FileNotFoundError):
            error = CorruptSlot("the job wrote over this step while the command read it: try again", step=step)
        except MlflashError as problem:
            error = CorruptSlot(problem.message, node=world.node_name, step=step)
    told = gather(world, mine)
    world.raise_together(error)
    found = Contents([shard for theirs in told for shard in theirs.shards])
    for theirs in told:
        found.plain |= theirs.plain
        found.provenance = found.provenance or theirs.provenance
    found.shards.sort(key=lambda shard: shard.rank)
    _refuse_unknown(world, tensor, found, step)
    seen = "committed" if one.committed else "no receipt of a commit"
    about = f"{seen}, {show_seconds(on_disk.age_s(one.unix_ns))} ago"
    return Shown(step, one.world_size, "memory", f"{about}; {one.scheme}", one.missing, found)


def _from_directory(world: World, directory: str | None, step: int, tensor: str | None) -> Shown | None:
    stored = on_disk.look_into(world, directory)
    one = next((listed for listed in stored.listed if listed.step == step), None) if stored is not None else None
    if stored is None or one is None:
        return None
    found, error, said = Contents(), None, Found()
    if world.rank == 0:
        try:
            found = checkpoint_contents.read_directory(stored.path, one, tensor, tensor is not None)
            said = on_disk.provenance_of(open_store(stored.path), one)
        except OSError as problem:
            error = CorruptSlot(f"{stored.path}/{one.folder} cannot be read: {problem}", step=step)
        except CorruptSlot as problem:
            error = problem
    world.raise_together(error)
    _refuse_unknown(world, tensor, found, step)
    about = f"{show_seconds(on_disk.age_s(one.card.unix_ns))} ago"
    return Shown(step, one.card.world_size, f"{stored.path}/{one.folder}", about, (), found, said)


def _refuse_unknown(world: World, tensor: str | None, found: Contents, step: int) -> None:
    there = world.broadcast(bool(found.shards or found.plain), 0)
    if tensor is not None and not there:
        raise click.ClickException(f"step {step} has no tensor or value {tensor!r}: `mlflash inspect {step}` lists all")
