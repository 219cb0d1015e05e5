"""The command ``mlflash verify``."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from ..config import Config
from ..drain.provenance import public_key
from ..errors import ConfigError, CorruptSlot, MlflashError
from ..memory.node_directory import NodeDirectory
from ..mpi.world import World, gather_from_all
from ..storage.store import open_store
from ..text import LIGHT, many, show_bytes
from . import completion, on_disk
from .jobs import choose_job
from .node_memory import Changed, File, Sealed, look
from .on_disk import Provenance, describe
from .options import job_options
from .output import progress_bar
from .run_on_ranks import Answer, together

if TYPE_CHECKING:
    from rich.console import Console


@dataclasses.dataclass
class Checked:
    """What the command read in one place: a node, or a checkpoint in the directory."""

    where: str
    files: int = 0  # files, nbytes: how many files and bytes were read
    nbytes: int = 0
    damaged: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    being_written: list[str] = dataclasses.field(default_factory=list)  # files that the job wrote while they were read
    provenance: Provenance | None = None

    def add(self, other: Checked) -> None:
        self.files, self.nbytes = self.files + other.files, self.nbytes + other.nbytes
        self.damaged = sorted(self.damaged + other.damaged)
        self.being_written = sorted(self.being_written + other.being_written)
        self.provenance = self.provenance or other.provenance

    @property
    def count(self) -> int:
        """The number of checked files. A provenance names more files than those with tensors."""
        if self.provenance is None:
            return self.files
        return self.provenance.count(self.files, [file for file, _ in self.damaged])

    def to_json(self) -> dict[str, Any]:
        document = {
            "where": self.where, "files": self.count, "nbytes": self.nbytes, "being_written": self.being_written,
            "damaged": [{"file": file, "damage": text} for file, text in self.damaged],
        }  # fmt: skip
        if self.provenance is not None:
            document["provenance"] = self.provenance.to_json(is_whole=not self.damaged)
        return document

    def show(self, console: Console) -> None:
        good = self.count - len({file for file, _ in self.damaged})
        text = f"{self.where}: {good} of {many(self.count, 'file')} good, {show_bytes(self.nbytes)}"
        text += f"; {len(self.being_written)} being written" if self.being_written else ""
        console.print(text, style="red" if self.damaged else None)
        for file, damage in self.damaged:
            console.print(f"  damaged: {file}: {damage}", style="red")
        if self.provenance is not None:
            console.print(f"  provenance: {_in_words(self.provenance, not self.damaged)}", soft_wrap=True)


@click.command()
@click.option("--key", metavar="PUBLIC.pem", shell_complete=completion.files,
              help="Require that this key signed each checkpoint in the directory.")  # fmt: skip
@job_options
@together
def verify(world: World, config: Config, job: str | None, key: str | None) -> Answer | None:
    """Read every byte in memory and in the directory, and compare it with its checksum.

    \b
    mlflash verify --directory /lustre/me/run42
    srun --ntasks-per-node=4 mlflash verify --directory /lustre/me/run42

    Alone it reads the memory of this node. It changes nothing, and the job may be alive. Exits with 1 if anything is
    damaged, is not signed by --key, or if nothing is there.
    """
    if key is not None and config.directory is None:
        raise click.UsageError("--key needs --directory, because checkpoints in memory are not signed")
    name = choose_job(world, config, job)
    stored = on_disk.look_into(world, config.directory)
    if stored is not None and stored.is_missing:
        raise click.ClickException(f"the directory {stored.path} does not exist")
    in_memory = _verify_memory(world, config, name)
    in_memory += [place for place in _verify_memory(world, config, name + LIGHT) if place.files or place.being_written]
    in_directory = [] if stored is None else _verify_directory(world, stored, key)
    document = {"job": name, "memory": [place.to_json() for place in in_memory],
                "directory": [place.to_json() for place in in_directory]}  # fmt: skip
    places = [*in_memory, *in_directory]
    is_empty = not any(place.files or place.being_written for place in places)

    def show(console: Console) -> None:
        for place in () if is_empty else places:
            place.show(console)
        if is_empty:
            console.print("nothing is there")

    return Answer(not is_empty and not any(place.damaged for place in places), document, show)


def _verify_memory(world: World, config: Config, job: str) -> list[Checked]:
    """Verify the memory of all nodes; the processes of a node share its files. Collective."""
    checked: list[Checked] = []
    error: MlflashError | None = None
    try:
        node = look(config.memory, job, world.node_name)
        checked.append(Checked(node.name + ", light saves" * job.endswith(LIGHT)))
        total = sum(file.header.extents.body_nbytes for file in node.files if file.header)
        with (progress_bar("memory", total // world.local_size, world.rank == 0) as advance,
              contextlib.closing(NodeDirectory(config.memory, job, make=False)) as held):  # fmt: skip
            for file in node.files[world.local_rank :: world.local_size]:
                _verify_file(held, file, checked[0], advance)
    except FileNotFoundError:  # the job's memory was deleted meanwhile
        pass
    except MlflashError as problem:
        problem.node = world.node_name
        error = problem
    world.raise_together(error)
    return _join(world, checked)


def _verify_file(held: NodeDirectory, file: File, checked: Checked, advance: Callable[[int], None]) -> None:
    if file.damage:
        checked.files += 1
        checked.damaged.append((file.name, file.damage))
    if file.header is None:
        return
    try:
        with Sealed(held, file.name, file.header) as sealed:
            sealed.verify(advance)
    except Changed:
        checked.being_written.append(file.name)
        return
    except CorruptSlot as error:
        what = file.header.kind.name.lower()
        checked.damaged.append((file.name, f"{what} of rank {file.header.rank}, step {file.header.step}: {error}"))
    checked.files += 1
    checked.nbytes += file.header.extents.body_nbytes


def _verify_directory(world: World, stored: on_disk.DirectoryContents, key_file: str | None) -> list[Checked]:
    try:
        key = world.on_all(lambda: public_key(key_file) if key_file is not None and world.rank == 0 else None)
    except ConfigError as error:
        raise click.UsageError(str(error)) from None
    store = open_store(stored.path)
    checked: list[Checked] = []
    total = sum(on_disk.stored_nbytes(store, listed) for listed in stored.listed) if world.rank == 0 else 0
    with progress_bar("directory", total // world.size, world.rank == 0) as advance:
        for listed in stored.listed:
            nbytes, wrong, provenance = on_disk.verify(world, store, listed, advance, key)
            files = len(range(world.rank, listed.card.world_size, world.size))
            checked.append(Checked(f"{stored.path}/{listed.folder}", files, nbytes, wrong, provenance=provenance))
    for folder in stored.damaged if world.rank == 0 else ():
        damage = ("the file that commits the checkpoint", "its first bytes are damaged")
        checked.append(Checked(f"{stored.path}/{folder}", 1, 0, [damage]))
    return _join(world, checked)


def _join(world: World, of_rank: list[Checked]) -> list[Checked]:
    places: dict[str, Checked] = {}
    for checked in (checked for of_process in gather_from_all(world, of_rank) for checked in of_process):
        places.setdefault(checked.where, Checked(checked.where)).add(checked)
    return list(places.values())


def _in_words(provenance: Provenance, is_whole: bool) -> str:
    if provenance.document is None:
        return "it does not hold"
    signed = {"none": "not signed", "not checked": "signed, not checked without --key", "good": "signed by this key",
              "bad": "not signed by this key"}[provenance.signature]  # fmt: skip
    return f"{describe(provenance.document)}; {signed}; it {'holds' if is_whole else 'does not hold'}"
