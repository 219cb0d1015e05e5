"""The contents of the directory: checkpoints, unfinished drains, and damage."""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Callable
from typing import Any

from ..draining import rank_table
from ..draining.checkpoint_directory import MASTERS, Listed, is_folder, list_checkpoints, read_index
from ..errors import ConfigError, CorruptSlot, MlflashError
from ..human_readable.wording import many
from ..memory.wanted_step import NEWEST
from ..mpi.world import World
from ..restoring.open_in_directory import OpenInDirectory
from ..storage.store import Directory, Store, open_store
from . import provenance_check
from .provenance_check import Found, Key


@dataclasses.dataclass(frozen=True)
class DirectoryContents:
    """What a directory holds.

    Attributes:
        path: path of the directory.
        listed: committed checkpoints, newest first, including those marked bad.
        unfinished: folders without the file that commits a checkpoint. A drain is writing them, or it died.
        damaged: folders whose commit cannot be read.
        is_missing: whether the directory does not exist. A job makes it with its first drain.
    """

    path: str
    listed: tuple[Listed, ...]
    unfinished: tuple[str, ...]
    damaged: tuple[str, ...]
    is_missing: bool

    @property
    def newest(self) -> Listed | None:
        """The checkpoint that a restore takes: the newest one that is not marked bad. None if there is none."""
        return next((one for one in self.listed if NEWEST.fits(one.step, one.verdict)), None)

    @property
    def passed_over(self) -> tuple[Listed, ...]:
        """The checkpoints that are marked bad and newer than the one that a restore takes, newest first."""
        return tuple(itertools.takewhile(lambda one: not NEWEST.fits(one.step, one.verdict), self.listed))

    def to_json(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        return {
            "path": self.path,
            "checkpoints": [checkpoint_to_json(self.path, one) for one in self.listed],
            "unfinished": list(self.unfinished),
            "damaged": list(self.damaged),
        }


def checkpoint_to_json(path: str, one: Listed) -> dict[str, Any]:
    """Return a checkpoint of a directory as plain values."""
    return {
        "step": one.step,
        "path": f"{path}/{one.folder}",
        "ranks": one.card.world_size,
        "generation": one.card.attempt.generation,
        "run": one.card.attempt.run_id.hex(),
        "age_s": age_s(one.card.unix_ns),
        "values": one.verdict.name.lower(),
    }


def age_s(unix_ns: int) -> float:
    """Return the seconds since a time."""
    return round(max(0.0, time.time() - unix_ns / 1e9), 3)


def look_into(world: World, directory: str | None) -> DirectoryContents | None:
    """Look at the contents of a directory.

    Collective over the world: rank 0 looks and tells all ranks. None if no directory is given.

    Raises:
        CorruptSlot: on all ranks, if the directory cannot be read.
    """
    if directory is None:
        return None
    found: DirectoryContents | None = None
    error: MlflashError | None = None
    if world.rank == 0:
        try:
            found = _look_into(open_store(directory))
        except MlflashError as problem:
            error = problem
        except Exception as problem:  # fsspec may raise anything
            error = CorruptSlot(f"{directory} cannot be read: {problem!r}")
    world.raise_together(error)
    stored: DirectoryContents | None = world.broadcast(found, 0)
    return stored


def _look_into(store: Store) -> DirectoryContents:
    listed = list_checkpoints(store)
    good = {one.folder for one in listed}
    unfinished: list[str] = []
    damaged: list[str] = []
    for folder in store.names():
        if is_folder(folder) and folder not in good:
            committed = set(store.at(folder).names()) & set(MASTERS)
            (damaged if committed else unfinished).append(folder)
    is_missing = not listed and isinstance(store, Directory) and not os.path.exists(store.path)
    return DirectoryContents(store.path, tuple(listed), tuple(unfinished), tuple(damaged), is_missing)


def stored_nbytes(store: Store, one: Listed) -> int:
    """Count the bytes of the tensors' files of a checkpoint; 0 if unknown."""
    try:
        table = rank_table.decode(read_index(store.at(one.folder), one), one.card.world_size)
        return sum(stored.data_nbytes for stored in table.files)
    except (MlflashError, OSError):
        return 0


def verify(world: World, store: Store, one: Listed, advance: Callable[[int], None], key: Key | None = None
           ) -> tuple[int, list[tuple[str, str]], Found | None]:  # fmt: skip
    """Read every byte of a checkpoint; each process reads the files of some ranks.

    Collective over the world.

    Args:
        advance: gets the number of bytes after each read.
        key: the key that must have signed the provenance. None: do not check.

    Returns:
        The bytes that this process has read, the damaged files with what is wrong with each, and on rank 0 the
        provenance.
    """
    found = world.broadcast(provenance_of(store, one, key) if world.rank == 0 else None, 0)
    nbytes, wrong = _verify_tensors(world, store, one, advance)
    told = found.wrong if world.rank == 0 else []
    if found.document is not None:
        told = told + provenance_check.verify_files(store.at(one.folder), one, found.document, world.rank, world.size)
    wrong += told
    return nbytes, wrong, found if world.rank == 0 else None


def provenance_of(store: Store, one: Listed, key: Key | None = None) -> Found:
    """Read the provenance of a checkpoint; see `provenance_check.find`."""
    return provenance_check.find(store.at(one.folder), one, key)


def _verify_tensors(world: World, store: Store, one: Listed, advance: Callable[[int], None]
                    ) -> tuple[int, list[tuple[str, str]]]:  # fmt: skip
    """Read all blocks of all tensors and compare their checksums. Collective over the world."""
    try:
        drained = OpenInDirectory(world, store, one)
    except CorruptSlot as error:  # the same on all ranks
        return 0, [(one.master, error.message)] if world.rank == 0 else []
    nbytes, wrong = 0, []
    try:
        for rank in range(world.rank, drained.world_size, world.size):
            try:
                name, read, bad = drained.verify(rank)
            except (ConfigError, CorruptSlot) as error:
                wrong.append((drained.name_of(rank), error.message))
                continue
            nbytes += read
            advance(read)
            wrong += [(name, f"{many(len(bad), 'part')} of tensors damaged, first {bad[0]}")] if bad else []
    finally:
        drained.close()
    return nbytes, wrong
