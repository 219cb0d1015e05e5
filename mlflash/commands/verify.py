"""The command ``mlflash verify``."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import click

from ..command_line import choose_job, shell_completion
from ..command_line.options import job_options, settings
from ..command_line.output import answer
from ..command_line.progress_bar import Bar
from ..command_line.run_on_ranks import FINE, WRONG, run_together
from ..config import Config
from ..errors import ConfigError, CorruptSlot, MlflashError
from ..human_readable.units import show_bytes
from ..human_readable.wording import many
from ..inspection import on_disk
from ..inspection.node_memory import File, look, places
from ..inspection.provenance_check import Found, Key, describe
from ..inspection.slot_file import Changed, Sealed
from ..memory.node_directory import NodeDirectory
from ..mpi.gather_on_rank_0 import gather_from_all
from ..mpi.world import World
from ..storage.signatures import public_key
from ..storage.store import open_store

if TYPE_CHECKING:
    from rich.console import Console


@dataclasses.dataclass
class Checked:
    """What the command read in one place: a node, or a checkpoint in the directory.

    Attributes:
        where: name of the node, or path of the checkpoint.
        files, nbytes: how many files and bytes were read.
        damaged: the damaged files, and what is wrong with each.
        written: files that the job wrote while they were read.
        provenance: the provenance of a checkpoint in the directory. None for memory.
    """

    where: str
    files: int = 0
    nbytes: int = 0
    damaged: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    written: list[str] = dataclasses.field(default_factory=list)
    provenance: Found | None = None


@click.command()
@click.option("--key", metavar="PUBLIC.pem", shell_complete=shell_completion.files,
              help="Require that this key signed each checkpoint in the directory.")  # fmt: skip
@job_options
def verify(key: str | None, directory: str | None, job: str | None, memory: str, as_json: bool) -> None:
    """Read every byte in memory and in the directory, and compare it with its checksum.

    Use it before you rely on a checkpoint. Alone it reads the memory of this node. Under srun or mpiexec it reads all
    nodes that it was started on, and the processes share the work. In the directory it also compares all files with
    the provenance of their checkpoint.

    \b
    mlflash verify --directory /lustre/me/run42
    srun --ntasks-per-node=4 mlflash verify --directory /lustre/me/run42

    It changes nothing. If the job writes a slot while the command reads it, the command reports the slot as being
    written, not as damaged. Exits with 1 if anything is damaged, is not signed by --key, or if nothing is there.
    """
    given = settings(memory, job, directory)
    if key is not None and directory is None:
        raise click.UsageError("--key needs --directory, because checkpoints in memory are not signed")

    def work(world: World) -> int:
        name = choose_job.choose(world, given, job, directory)
        in_memory = _verify_memory(world, given, name)
        on_its_disk = _verify_directory(world, given.directory, key)
        if world.rank:
            return FINE
        found = [*in_memory, *on_its_disk]
        document = {
            "job": name,
            "memory": [_to_json(one) for one in in_memory],
            "directory": [_to_json(one) for one in on_its_disk],
        }
        answer(as_json, document, lambda console: _show(console, found))
        is_there = any(one.files or one.written for one in found)
        return FINE if is_there and not any(one.damaged for one in found) else WRONG

    run_together(given, as_json, work)


def _verify_memory(world: World, given: Config, job: str) -> list[Checked]:
    """Verify the memory of all nodes; the processes of a node share its files. Collective; rank 0 gets the result."""
    mine: dict[str, Checked] = {}
    error: MlflashError | None = None
    try:
        nodes = [look(given.memory, job, number, name) for number, name in places(world, given.memory, job)]
        total = sum(file.header.extents.body_nbytes for node in nodes for file in node.files if file.header)
        with Bar("memory", total // world.local_size, world.rank == 0) as bar:
            for node in nodes:
                checked = mine[node.name] = Checked(node.name)
                if not node.path:
                    continue
                held = NodeDirectory(given.memory, job, node.emulated, make=False)
                try:
                    for file in node.files[world.local_rank :: world.local_size]:
                        _verify_file(held, file, checked, bar)
                finally:
                    held.close()
    except FileNotFoundError:  # the job's memory was deleted meanwhile
        pass
    except MlflashError as problem:
        problem.node = world.node_name
        error = problem
    world.raise_together(error)
    return _join(gather_from_all(world, mine))


def _verify_file(held: NodeDirectory, file: File, checked: Checked, bar: Bar) -> None:
    if file.damage:
        checked.files += 1
        checked.damaged.append((file.name, file.damage))
    if file.header is None:
        return
    try:
        with Sealed(held, file.name, file.header) as sealed:
            sealed.verify(bar.advance)
    except Changed:
        checked.written.append(file.name)
        return
    except CorruptSlot as error:
        what = file.header.kind.name.lower()
        checked.damaged.append((file.name, f"{what} of rank {file.header.rank}, step {file.header.step}: {error}"))
    checked.files += 1
    checked.nbytes += file.header.extents.body_nbytes


def _verify_directory(world: World, directory: str | None, key_file: str | None) -> list[Checked]:
    key = _key(world, key_file)
    stored = on_disk.look_into(world, directory)
    if stored is None:
        return []
    store = open_store(stored.path)
    mine: dict[str, Checked] = {}
    total = sum(on_disk.stored_nbytes(store, one) for one in stored.listed) if world.rank == 0 else 0
    with Bar("directory", total // world.size, world.rank == 0) as bar:
        for one in stored.listed:
            nbytes, wrong, provenance = on_disk.verify(world, store, one, bar.advance, key)
            where, ranks = f"{stored.path}/{one.folder}", len(range(world.rank, one.card.world_size, world.size))
            mine[where] = Checked(where, ranks, nbytes, wrong, provenance=provenance)
    for folder in stored.damaged if world.rank == 0 else ():
        where = f"{stored.path}/{folder}"
        mine[where] = Checked(where, 1, 0, [("the file that commits the checkpoint", "its first bytes are damaged")])
    return _join(gather_from_all(world, mine))


def _key(world: World, file: str | None) -> Key | None:
    """Read the key that must have signed. Only rank 0 gets it. Collective over the world."""
    found: Key | None = None
    error: ConfigError | None = None
    if file is not None and world.rank == 0:
        try:
            found = public_key(file)
        except ConfigError as problem:
            error = problem
    error = world.broadcast(error, 0)
    if error is not None:
        raise click.UsageError(str(error))
    return found


def _join(told: list[dict[str, Checked]]) -> list[Checked]:
    """Add up what several processes read in the same places."""
    found: dict[str, Checked] = {}
    for theirs in told:
        for where, one in theirs.items():
            all_of = found.setdefault(where, Checked(where))
            all_of.files += one.files
            all_of.nbytes += one.nbytes
            all_of.damaged = sorted([*all_of.damaged, *one.damaged])
            all_of.written = sorted([*all_of.written, *one.written])
            all_of.provenance = all_of.provenance or one.provenance
    for one in found.values():
        if one.provenance is not None:  # it names more files than the ones with tensors
            one.files = one.provenance.count(one.files, [file for file, _ in one.damaged])
    return list(found.values())


def _to_json(one: Checked) -> dict[str, Any]:
    damaged = [{"file": file, "damage": text} for file, text in one.damaged]
    found = {"where": one.where, "files": one.files, "nbytes": one.nbytes, "damaged": damaged,
             "being_written": one.written}  # fmt: skip
    said = one.provenance
    return found if said is None else found | {"provenance": said.to_json(is_whole=not one.damaged)}


def _show(console: Console, found: list[Checked]) -> None:
    if not any(one.files or one.written for one in found):
        console.print("nothing is there")
        return
    for one in found:
        good = one.files - len({file for file, _ in one.damaged})
        text = f"{one.where}: {good} of {many(one.files, 'file')} good, {show_bytes(one.nbytes)}"
        text += f"; {len(one.written)} being written" if one.written else ""
        console.print(text, style="red" if one.damaged else None)
        for file, what in one.damaged:
            console.print(f"  damaged: {file}: {what}", style="red")
        if one.provenance is not None:
            console.print(f"  provenance: {_in_words(one.provenance, not one.damaged)}", soft_wrap=True)


def _in_words(found: Found, is_whole: bool) -> str:
    """Say what a provenance records, and whether the files match it."""
    if found.document is None:
        return "it does not hold"
    signed = {"none": "not signed", "not checked": "signed, not checked without --key", "good": "signed by this key",
              "bad": "not signed by this key"}[found.signature]  # fmt: skip
    return f"{describe(found.document)}; {signed}; it {'holds' if is_whole else 'does not hold'}"
