"""The command ``mlflash inspect``."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from ..config import Config
from ..errors import CorruptSlot, MlflashError
from ..mpi.world import World, gather
from ..storage.store import open_store
from ..text import many, named, show_bytes, show_seconds
from . import checkpoint_contents, choose_job, on_disk, shell_completion
from .checkpoint_contents import Contents, Itinerary, Shard, Statistics
from .node_memory import Changed, look_around
from .on_disk import Provenance, describe, versions_of
from .options import job_options, settings
from .output import answer, new_table
from .restorability import Prospect, what_is_restorable
from .run_on_ranks import FINE, run_together

if TYPE_CHECKING:
    from rich.console import Console

_LONGEST = 100  # of a plain leaf, characters


@click.command("inspect")
@click.argument("step", type=click.IntRange(0), shell_complete=shell_completion.steps)
@click.argument("tensor", required=False)
@click.option("--from", "source", type=click.Choice(["memory", "directory"]),
              help="Where to look.  [default: memory, then the directory]")  # fmt: skip
@job_options
def inspect_step(step: int, tensor: str | None, source: str | None, directory: str | None, job: str | None,
                 memory: str, as_json: bool) -> None:  # fmt: skip
    """Show the tensors of the checkpoint of STEP: names, dtypes, shapes and sizes.

    \b
    mlflash inspect 40
    mlflash inspect 40 "model.*.weight" --directory /lustre/me/run42

    With TENSOR, a name or a pattern, it also shows statistics, and where each byte of the tensor is.
    """
    given = settings(memory, job, directory)
    if source == "directory" and directory is None:
        raise click.UsageError("--from directory needs --directory")

    def work(world: World) -> int:
        name = choose_job.choose(world, given, job)
        shown = None if source == "directory" else _from_memory(world, given, name, step, tensor)
        if shown is None and source != "memory":
            shown = _from_directory(world, given.directory, step, tensor)
        if shown is None:
            raise click.ClickException(f"there is no step {step} in {source or 'memory or the directory'}"
                                       + ("" if directory else " (no --directory was given)"))  # fmt: skip
        if world.rank:
            return FINE
        answer(as_json, shown.to_json(), lambda console: shown.show(console, tensor is not None))
        return FINE

    run_together(given, as_json, work)


def _from_memory(world: World, given: Config, job: str, step: int, tensor: str | None) -> Checkpoint | None:
    """Read a step from memory. All ranks learn whether it is there; rank 0 gets what it holds. Collective."""
    nodes = look_around(world, given.memory, job)
    plan: tuple[Prospect, Itinerary] | None = None
    if world.rank == 0:
        outlook = what_is_restorable(nodes, world.world is not None)
        attempt = checkpoint_contents.attempt_to_show(outlook.prospects, step)
        plan = None if attempt is None else (attempt, checkpoint_contents.plan(nodes, attempt))
    plan = world.broadcast(plan, 0)
    if plan is None:
        return None
    attempt, way = plan
    mine, error = Contents(), None
    if world.local_rank == 0:
        try:
            mine = checkpoint_contents.read_memory(given.memory, job, world.node_name, way, tensor, tensor is not None)
        except (Changed, FileNotFoundError):
            error = CorruptSlot("the job wrote over this step while the command read it: try again", step=step)
        except MlflashError as problem:
            error = CorruptSlot(problem.message, node=world.node_name, step=step)
    told = gather(world, mine)
    world.raise_together(error)
    contents = Contents(sorted((shard for part in told for shard in part.shards), key=lambda shard: shard.rank))
    for part in told:
        contents.plain |= part.plain
        contents.provenance = contents.provenance or part.provenance
    _refuse_unknown(world, tensor, contents, step)
    seen = "committed" if attempt.committed else "no receipt of a commit"
    about = f"{seen}, {show_seconds(on_disk.age_s(attempt.unix_ns))} ago; redundancy: {attempt.scheme}"
    return Checkpoint(step, attempt.world_size, "memory", about, attempt.missing, contents)


def _from_directory(world: World, directory: str | None, step: int, tensor: str | None) -> Checkpoint | None:
    stored = on_disk.look_into(world, directory)
    listed = next((listed for listed in stored.listed if listed.step == step), None) if stored is not None else None
    if stored is None or listed is None:
        return None
    contents, error, provenance = Contents(), None, Provenance()
    if world.rank == 0:
        try:
            contents = checkpoint_contents.read_directory(stored.path, listed, tensor, tensor is not None)
            provenance = on_disk.provenance_of(open_store(stored.path), listed)
        except OSError as problem:
            error = CorruptSlot(f"{stored.path}/{listed.folder} cannot be read: {problem}", step=step)
        except CorruptSlot as problem:
            error = problem
    world.raise_together(error)
    _refuse_unknown(world, tensor, contents, step)
    about = f"{show_seconds(on_disk.age_s(listed.card.unix_ns))} ago"
    path = f"{stored.path}/{listed.folder}"
    return Checkpoint(step, listed.card.world_size, path, about, (), contents, provenance)


def _refuse_unknown(world: World, tensor: str | None, contents: Contents, step: int) -> None:
    there = world.broadcast(bool(contents.shards or contents.plain), 0)
    if tensor is not None and not there:
        raise click.ClickException(f"step {step} has no tensor or value {tensor!r}: `mlflash inspect {step}` lists all")


@dataclasses.dataclass
class Tensor:
    """The shards of one tensor: all have the same name, dtype and shape."""

    shards: list[Shard]

    @functools.cached_property
    def boxes(self) -> list[list[Shard]]:
        """The shards by their place in the tensor: those of a box are the same part of it."""
        boxes: dict[tuple[Any, ...], list[Shard]] = {}
        for shard in self.shards:
            boxes.setdefault((shard.entry.offset, shard.entry.shape), []).append(shard)
        return list(boxes.values())

    @property
    def nbytes(self) -> int:
        return sum(box[0].entry.nbytes for box in self.boxes)

    @property
    def differs(self) -> bool:
        return any(len({shard.numbers.check for shard in box if shard.numbers}) > 1 for box in self.boxes)

    @property
    def statistics(self) -> Statistics | None:
        """The statistics of the whole tensor. None if they are unknown, or ranks hold different bytes."""
        joined = Statistics()
        for box in self.boxes:
            numbers = next((shard.numbers for shard in box if shard.numbers is not None), None)
            if numbers is None or self.differs:
                return None
            joined.join(numbers)
        return joined

    @property
    def held(self) -> str:
        ranks = named({shard.rank for shard in self.shards})
        whole = all(shard.entry.shape == shard.entry.global_shape for shard in self.shards)
        return f"whole, {ranks}" if whole else f"{len(self.boxes)} parts, {ranks}"

    def to_json(self) -> dict[str, Any]:
        first, statistics = self.shards[0].entry, self.statistics
        shards = [{
            "rank": shard.rank, "offset": list(shard.entry.offset), "shape": list(shard.entry.shape),
            "nbytes": shard.entry.nbytes, "node": shard.node or None,
            "bytes": [dataclasses.asdict(run) for run in shard.runs],
            "statistics": None if shard.numbers is None else shard.numbers.to_json(),
        } for shard in self.shards]  # fmt: skip
        joined = None if statistics is None else statistics.to_json()
        if joined is not None:
            del joined["check"]  # which is of the bytes of a shard
        return {"name": first.name, "kind": first.kind, "dtype": first.dtype, "shape": list(first.global_shape),
                "nbytes": self.nbytes, "statistics": joined, "shards": shards}  # fmt: skip

    def show(self, console: Console) -> None:
        first = self.shards[0].entry
        console.print(f"\n{first.name}: {first.kind} {first.dtype} {_shape(first.global_shape)}, "
                      f"{show_bytes(self.nbytes)}, {self.held}", markup=False)  # fmt: skip
        table = new_table(">rank", "offset", "shape", ">size", "node", "file", ">byte")
        for shard in self.shards:
            begin = [str(shard.rank), _shape(shard.entry.offset), _shape(shard.entry.shape)]
            for run in shard.runs:
                at = f"{run.start:,}" if run.start >= 0 else "compressed"
                table.add_row(*begin, show_bytes(run.nbytes), shard.node or "-", run.file, at)
                begin = [""] * 3
            if not shard.runs:
                table.add_row(*begin, show_bytes(shard.entry.nbytes), shard.node, "parts on other nodes", "")
        console.print(table)
        table = new_table(">rank", ">min", ">max", ">mean", ">std", ">nan", ">inf", ">zeros", "checksum")
        for shard in self.shards:
            if shard.numbers is not None:
                table.add_row(str(shard.rank), *_figures(shard.numbers), f"{shard.numbers.check:016x}")
        if len(self.boxes) > 1 and (statistics := self.statistics) is not None:
            table.add_row("all", *_figures(statistics), "")
        console.print(table)
        if self.differs:
            console.print("ranks that hold the same part of this tensor hold different bytes", style="yellow")


@dataclasses.dataclass
class Checkpoint:
    """A checkpoint that is shown."""

    step: int
    ranks: int
    source: str  # "memory", or the path in the directory
    about: str
    missing: tuple[int, ...]
    contents: Contents
    provenance: Provenance | None = None

    @property
    def tensors(self) -> list[Tensor]:
        tensors: dict[tuple[Any, ...], Tensor] = {}
        for shard in self.contents.shards:
            entry = shard.entry
            key = (entry.name, entry.kind, entry.dtype, entry.global_shape)
            tensors.setdefault(key, Tensor([])).shards.append(shard)
        return list(tensors.values())

    def to_json(self) -> dict[str, Any]:
        said = (self.contents.provenance or None) if self.provenance is None else self.provenance.said
        return {"step": self.step, "ranks": self.ranks, "source": self.source, "missing_ranks": list(self.missing),
                "tensors": [tensor.to_json() for tensor in self.tensors],
                "plain": {name: _plain(value) for name, value in self.contents.plain.items()},
                "provenance": said}  # fmt: skip

    def show(self, console: Console, closely: bool) -> None:
        """Print a line for each tensor. With ``closely`` print each of its shards."""
        console.print(f"step {self.step} of {many(self.ranks, 'rank')}, from {self.source}; {self.about}")
        for style, line in self._lines_of_provenance():
            console.print(line, style=style, markup=False, soft_wrap=True)
        if self.missing:
            console.print(f"no slot of {named(self.missing)} is on the nodes that were read", style="yellow")
        table = new_table("tensor", "dtype", "shape", ">size", "held")
        for tensor in self.tensors:
            if closely:
                tensor.show(console)
            first = tensor.shards[0].entry
            table.add_row(first.name, first.dtype, _shape(first.global_shape), show_bytes(tensor.nbytes), tensor.held)
        if table.row_count and not closely:
            console.print(table)
        for name, value in self.contents.plain.items():
            text = repr(value)
            console.print(f"{name} = {text if len(text) <= _LONGEST else text[:_LONGEST] + '...'}", markup=False)

    def _lines_of_provenance(self) -> list[tuple[str | None, str]]:
        if self.provenance is None:
            said = self.contents.provenance
            return [(None, "; ".join(filter(None, (f"provenance: {versions_of(said)}", _given(said)))))] if said else []
        document = self.provenance.document
        if document is None:
            return [("yellow", "its provenance cannot be used: `mlflash verify` says why")]
        signed = "" if self.provenance.signature == "none" else f"signed by the key {document['signer']}"
        more = "; ".join(filter(None, (_given(document), signed)))
        return [(None, f"provenance: {describe(document)}"), *([(None, f"  {more}")] if more else [])]


def _given(provenance: Any) -> str:
    return json.dumps(provenance["given"], ensure_ascii=False) if provenance["given"] else ""


def _plain(value: Any) -> Any:
    """Return a plain leaf as a JSON value if there is one, else as its ``repr``."""
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    return value if type(value) is float and math.isfinite(value) else repr(value)


def _figures(of: Statistics) -> list[str]:
    known = [of.low, of.high, of.mean if of.count else None, of.std]
    return [*("-" if number is None else f"{number:.4g}" for number in known), f"{of.nan:,}", f"{of.inf:,}",
            f"{of.zeros:,}"]  # fmt: skip


def _shape(numbers: Sequence[int]) -> str:
    return f"[{', '.join(map(str, numbers))}]"
