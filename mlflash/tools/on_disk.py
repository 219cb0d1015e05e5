"""The contents of the directory: checkpoints, unfinished drains, and damage."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..drain import checkpoint_directory, provenance
from ..drain.checkpoint_directory import DATA_NAME, PROVENANCE, SIGNATURE, VERDICT, Listed
from ..drain.index import CARD_NBYTES, Card, decode_places, decode_table, read_card
from ..errors import ConfigError, CorruptSlot, MlflashError
from ..memory.inventory import NEWEST
from ..memory.slot import Verdict
from ..mpi.world import World
from ..restore.open_in_directory import OpenInDirectory
from ..storage.store import Directory, Store, open_store
from ..text import listed, many
from .output import age_s

_CHUNK_NBYTES = 8 << 20
_NAMED = 4  # hosts in a line
IsGood = Callable[[bytes, bytes], bool]
Key = tuple[IsGood, str]
"""A function that checks a signature of some bytes, and the key as `provenance.public_key` returns it."""


@dataclasses.dataclass(frozen=True)
class DirectoryContents:
    """What a directory holds."""

    path: str
    listed: tuple[Listed, ...]  # committed checkpoints, newest first, including those marked bad
    unfinished: tuple[str, ...]  # folders without a commit: a drain is writing them, or it died
    damaged: tuple[str, ...]  # folders whose commit cannot be read
    is_missing: bool

    @property
    def newest(self) -> Listed | None:
        """The checkpoint that a restore takes: the newest one that is not marked bad. None if there is none."""
        return next(filter(_is_restored, self.listed), None)

    @property
    def passed_over(self) -> tuple[Listed, ...]:
        """The checkpoints that are marked bad and newer than the one that a restore takes, newest first."""
        return tuple(itertools.takewhile(lambda listed: not _is_restored(listed), self.listed))

    def to_json(self) -> dict[str, Any]:
        checkpoints = [{
            "step": listed.step, "path": f"{self.path}/{listed.folder}", "ranks": listed.card.world_size,
            "generation": listed.card.attempt.generation, "run": listed.card.attempt.run_id.hex(),
            "age_s": age_s(listed.card.unix_ns), "values": listed.verdict.name.lower(),
        } for listed in self.listed]  # fmt: skip
        return {"path": self.path, "checkpoints": checkpoints, "unfinished": list(self.unfinished),
                "damaged": list(self.damaged)}  # fmt: skip


def _is_restored(listed: Listed) -> bool:
    return NEWEST.fits(listed.step, listed.verdict)


def look_into(world: World, directory: str | None) -> DirectoryContents | None:
    """Look at the contents of a directory.

    Collective over the world: rank 0 looks and tells all ranks. None if no directory is given.
    """
    if directory is None:
        return None

    def look() -> DirectoryContents:
        try:
            return _look_into(open_store(directory))
        except MlflashError:
            raise
        except Exception as problem:  # fsspec may raise anything
            raise CorruptSlot(f"{directory} cannot be read: {problem!r}") from problem

    contents = world.on_all(lambda: look() if world.rank == 0 else None)
    of_rank_0: DirectoryContents | None = world.broadcast(contents, 0)
    return of_rank_0


def _look_into(store: Store) -> DirectoryContents:
    listed = checkpoint_directory.list_checkpoints(store)
    good = {checkpoint.folder for checkpoint in listed}
    others = [folder for folder in store.names()
              if checkpoint_directory.step_of(folder) is not None and folder not in good]  # fmt: skip
    damaged = {folder for folder in others if {*checkpoint_directory.MASTERS} & {*store.at(folder).names()}}
    is_missing = not listed and isinstance(store, Directory) and not os.path.exists(store.path)
    return DirectoryContents(store.path, tuple(listed), tuple(folder for folder in others if folder not in damaged),
                             tuple(folder for folder in others if folder in damaged), is_missing)  # fmt: skip


def stored_nbytes(store: Store, listed: Listed) -> int:
    """Count the bytes of the tensors' files of a checkpoint; 0 if unknown."""
    try:
        index = checkpoint_directory.read_index(store.at(listed.folder), listed)
        return sum(stored.data_nbytes for stored in decode_table(index, listed.card.world_size).files)
    except (MlflashError, OSError):
        return 0


def verify(world: World, store: Store, listed: Listed, advance: Callable[[int], None], key: Key | None = None
           ) -> tuple[int, list[tuple[str, str]], Provenance | None]:  # fmt: skip
    """Read every byte of a checkpoint; each process reads the files of some ranks. Collective.

    The result: bytes that this process has read, damaged files with what is wrong, and on rank 0 the provenance.
    """
    provenance = world.broadcast(provenance_of(store, listed, key) if world.rank == 0 else None, 0)
    nbytes, wrong = _verify_tensors(world, store, listed, advance)
    wrong += provenance.wrong if world.rank == 0 else []
    if provenance.document is not None:
        wrong += verify_files(store.at(listed.folder), listed, provenance.document, world.rank, world.size)
    return nbytes, wrong, provenance if world.rank == 0 else None


def _verify_tensors(world: World, store: Store, listed: Listed, advance: Callable[[int], None]
                    ) -> tuple[int, list[tuple[str, str]]]:  # fmt: skip
    try:
        drained = OpenInDirectory(world, store, listed)
    except CorruptSlot as error:  # the same on all ranks
        return 0, [(listed.master, error.message)] if world.rank == 0 else []
    nbytes, wrong = 0, []
    with contextlib.closing(drained):
        for rank in range(world.rank, drained.world_size, world.size):
            try:
                name, nbytes_of_rank, bad = drained.verify(rank)
            except (ConfigError, CorruptSlot) as error:
                wrong.append((drained.name_of(rank), error.message))
                continue
            nbytes += nbytes_of_rank
            advance(nbytes_of_rank)
            wrong += [(name, f"{many(len(bad), 'part')} of tensors damaged, first {bad[0]}")] if bad else []
    return nbytes, wrong


# The provenance of a drained checkpoint: its record, and whether the files match it.


@dataclasses.dataclass
class Provenance:
    """The provenance of a checkpoint, and what is wrong with it."""

    document: dict[str, Any] | None = None
    signature: str = "none"  # "none", "not checked" (no key was given), "good" or "bad"
    wrong: list[tuple[str, str]] = dataclasses.field(default_factory=list)  # files, and what is wrong with each
    has_verdict: bool = False

    def count(self, ranks: int, damaged: Iterable[str]) -> int:
        if self.document is None:
            return ranks + len({file for file, _ in self.wrong} | ({VERDICT} if self.has_verdict else set()))
        more = [SIGNATURE] * (self.signature != "none") + [VERDICT] * self.has_verdict
        return len({PROVENANCE, *more, *self.document["files"], *damaged})

    @property
    def origin(self) -> dict[str, Any] | None:
        """The document without the digests of files."""
        return None if self.document is None else {key: value for key, value in self.document.items() if key != "files"}

    def to_json(self, is_whole: bool) -> dict[str, Any]:
        return {"said": self.origin, "signature": self.signature, "holds": bool(self.document and is_whole)}


def provenance_of(store: Store, listed: Listed, key: Key | None = None) -> Provenance:
    """Read the provenance of a checkpoint, and check it and its signature. `verify_files` checks the files."""
    inside = store.at(listed.folder)
    result = Provenance(has_verdict=listed.verdict is not Verdict.UNKNOWN)
    if not result.has_verdict and _is_there(inside, VERDICT):
        result.wrong.append((VERDICT, "it does not say what is known of this checkpoint"))
    try:
        document = provenance.read(inside.read(PROVENANCE))
    except (CorruptSlot, OSError) as error:
        result.wrong.append((PROVENANCE, _why_unreadable(error)))
        return result
    card = listed.card
    save = document["step"], document["run"], document["generation"], document["world_size"]
    if save != (card.step, card.attempt.run_id.hex(), card.attempt.generation, card.world_size):
        result.wrong.append((PROVENANCE, f"it is of another checkpoint than {listed.master}: of {_checkpoint(*save)}, "
                                        f"and that is of {_checkpoint_of(card)}"))  # fmt: skip
        return result
    result.document = document
    _check_signature(inside, document, key, result)
    return result


def _check_signature(inside: Store, document: Mapping[str, Any], key: Key | None, result: Provenance) -> None:
    try:
        signature = inside.read(SIGNATURE)
    except OSError as error:
        if document["signer"]:
            result.wrong.append((SIGNATURE, _why_unreadable(error)))
        elif key is not None:
            result.wrong.append((PROVENANCE, "it is not signed"))
        return
    result.signature = "not checked"
    if key is None:
        return
    is_good, public = key
    result.signature = "good" if is_good(signature, document["digest"].encode()) else "bad"
    if result.signature == "bad":
        result.wrong.append((SIGNATURE, "it is no signature of this provenance" if document["signer"] == public else
                            f"another key has signed this: {document['signer'] or 'unknown'}"))  # fmt: skip


def _why_unreadable(error: OSError | CorruptSlot) -> str:
    if isinstance(error, CorruptSlot):
        return str(error)
    return "it is missing" if isinstance(error, FileNotFoundError) else f"it cannot be read: {error}"


def verify_files(inside: Store, listed: Listed, document: Mapping[str, Any], first: int, among: int
                 ) -> list[tuple[str, str]]:  # fmt: skip
    """Compare files with a provenance. Return the files that differ, and how.

    This reads no tensors, because the checksums of their blocks are compared.
    """
    recorded = document["files"]
    wrong = [(name, difference) for name in sorted(recorded)[first::among]
             if (difference := _difference(inside, listed, name, recorded[name]))]  # fmt: skip
    if not first:
        present = {name for name in inside.names() if checkpoint_directory.FILE_NAME.fullmatch(name)}
        wrong += [(name, "it is not among the files of this checkpoint") for name in sorted(present - {*recorded})]
    return wrong


def _difference(inside: Store, listed: Listed, name: str, recorded: Mapping[str, Any]) -> str:
    try:
        nbytes = inside.nbytes(name)
        card = _card(inside, name)
        if card is not None and card.attempt != listed.card.attempt:
            return f"it is of another checkpoint: of {_checkpoint_of(card)}"
        if card is not None and name.startswith("rank-") and card.rank != int(re.findall(r"\d+", name)[0]):
            return f"it is the file {f'of rank {card.rank}' if card.rank >= 0 else 'that commits a checkpoint'}"
        if nbytes != recorded["nbytes"]:
            return f"it has {nbytes} bytes, but had {recorded['nbytes']} when it was drained"
        digest = hashlib.sha256()
        for start, end in _beside(_tensors(inside, name, card, nbytes), nbytes):
            for at in range(start, end, _CHUNK_NBYTES):
                digest.update(inside.read(name, at, min(_CHUNK_NBYTES, end - at)))
    except FileNotFoundError as error:
        return "it is missing" if not _is_there(inside, name) else f"it cannot be read: {error}"
    except (CorruptSlot, OSError) as error:
        return f"it was changed: {error}"
    return "" if digest.hexdigest() == recorded["sha256"] else "it was changed: its SHA-256 is not the one recorded"


def _is_there(inside: Store, name: str) -> bool:
    try:
        inside.nbytes(name)
    except OSError:
        return False
    return True


def _card(inside: Store, name: str) -> Card | None:
    if DATA_NAME.fullmatch(name) or name == ".metadata":
        return None
    return read_card(inside.read(name, 0, CARD_NBYTES))


def _tensors(inside: Store, name: str, card: Card | None, nbytes: int) -> list[tuple[int, int]]:
    """Return where tensors with their own checksums begin and end in a file, from the index of their rank."""
    match = DATA_NAME.fullmatch(name)
    if match is not None:
        name = f"rank-{int(match[1]):05d}.mlflash"
        card = read_card(inside.read(name, 0, CARD_NBYTES))
    elif not re.fullmatch(r"rank-\d+\.h5", name):
        return []
    assert card is not None
    places, _ = decode_places(inside.read(name, card.index_start, card.index_nbytes), name, nbytes)
    return [(place.start, place.start + place.nbytes) for place in places.of.values()
            if place.nbytes and not place.packed]  # fmt: skip


def _beside(tensors: Sequence[tuple[int, int]], nbytes: int) -> Iterator[tuple[int, int]]:
    at = 0
    for start, end in sorted(tensors):
        if start > at:
            yield at, start
        at = max(at, end)
    if nbytes > at:
        yield at, nbytes


def _checkpoint_of(card: Card) -> str:
    return _checkpoint(card.step, card.attempt.run_id.hex(), card.attempt.generation, card.world_size)


def _checkpoint(step: int, run: str, generation: int, world_size: int) -> str:
    return f"step {step} of {many(world_size, 'rank')}, save {generation} of run {run[:8]}"


def versions_of(document: Mapping[str, Any]) -> str:
    """List the versions in a provenance in one line."""
    return ", ".join(f"{name} {version}" for name, version in document["versions"].items())


def describe(document: Mapping[str, Any]) -> str:
    """Describe a provenance in one line."""
    hosts = listed([node["host"] for node in document["nodes"]], _NAMED) or "no node"
    by = "" if document["by"] == "job" else f", drained by `mlflash {document['by']}`"
    return (f"step {document['step']} of job {document['job']}: {many(document['world_size'], 'rank')} on {hosts}, "
            f"{document['redundancy']}; saved {document['saved'][:19]}Z{by}; {versions_of(document)}")  # fmt: skip
