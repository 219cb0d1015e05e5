"""The checkpoints in a directory: which exist, how the next one is named, which may be deleted.

Their folders are ``step-00001200``, and ``step-00001200.1`` if the step is drained again. The file that commits a
checkpoint is written last and deleted first. Only files whose card names this job are deleted.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Sequence

import xxhash

from ..crash_points import reach
from ..errors import CorruptSlot
from ..memory.slot import Attempt, Verdict
from ..storage.store import Store, each
from .index import CARD_NBYTES, Card, read_card

log = logging.getLogger("mlflash")

MASTERS = ("checkpoint.h5", "checkpoint.mlflash")
PROVENANCE = "provenance.json"
SIGNATURE = "provenance.json.sig"
_STEP = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
VERDICT = "verdict"
"""The file that says what is known of the values of a checkpoint."""
FILE_NAME = re.compile(r"rank-\d{5,}\.(?:h5|mlflash)|__\d+_\d+\.distcp|\.metadata|checkpoint\.(?:h5|mlflash)")
DATA_NAME = re.compile(r"__(\d+)_0\.distcp")
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.(?P<tag>(?P<run>[0-9a-f]{32})-\d+-(?P<owner>[0-9a-f]{16}))\.tmp")


@dataclasses.dataclass(frozen=True)
class Listed:
    """A committed checkpoint in a directory."""

    folder: str
    master: str
    card: Card
    verdict: Verdict = Verdict.UNKNOWN  # what is known about its values

    @property
    def step(self) -> int:
        return self.card.step

    @property
    def age(self) -> tuple[int, int]:
        """Sort key: when the checkpoint was saved. Generations only grow, from run to run."""
        return self.card.attempt.generation, self.card.unix_ns


@dataclasses.dataclass(frozen=True)
class Listing:
    """What is in a directory."""

    listed: tuple[Listed, ...] = ()
    # folders whose committing file exists but cannot be read, and why
    damaged: dict[str, str] = dataclasses.field(default_factory=dict)
    problem: str = ""  # why the directory cannot be read; "" if it can be read or does not exist


def tag(attempt: Attempt, owner: str) -> str:
    """The part of a temporary name that says which save and which job it belongs to."""
    return f"{attempt.run_id.hex()}-{attempt.generation}-{_digest(owner)}"


def _digest(owner: str) -> str:
    return xxhash.xxh3_64_hexdigest(owner.encode())


def step_of(name: str) -> int | None:
    """The step that a folder is named after; None if it is not the folder of a checkpoint."""
    match = _STEP.fullmatch(name)
    return None if match is None else int(match[1])


def list_checkpoints(store: Store) -> list[Listed]:
    """List the committed checkpoints, newest first; see `scan`."""
    return [*scan(store).listed]


def scan(store: Store) -> Listing:
    """List what is in a directory. Reads only the first bytes of each checkpoint. Raises OSError."""
    listed: list[Listed] = []
    damaged: dict[str, str] = {}
    for folder in store.names():
        inside = store.at(folder)
        for master in MASTERS if step_of(folder) is not None else ():
            try:
                card = read_card(inside.read(master, 0, CARD_NBYTES))
            except (FileNotFoundError, NotADirectoryError):
                continue
            except (CorruptSlot, OSError) as error:  # skip only this one: the others are whole
                log.warning("%s/%s is passed over: %s", inside.path, master, error)
                damaged[folder] = f"{master}: {error}"
                continue
            if card.rank < 0:
                listed.append(Listed(folder, master, card, read_verdict(inside, card)))
                damaged.pop(folder, None)
                break
    return Listing(tuple(sorted(listed, key=lambda checkpoint: checkpoint.age, reverse=True)), damaged)


def read_verdict(inside: Store, card: Card) -> Verdict:
    """Read what is known about the values of a checkpoint; ``inside`` is its folder."""
    try:
        word, of = inside.read(VERDICT).decode(errors="replace").split()
    except (OSError, ValueError):
        return Verdict.UNKNOWN
    known = of == tag(card.attempt, card.owner) and word in Verdict.__members__
    return Verdict[word] if known else Verdict.UNKNOWN


def write_verdict(inside: Store, attempt: Attempt, owner: str, verdict: Verdict) -> None:
    """Write what is known about the values of a checkpoint."""
    owner_tag = tag(attempt, owner)
    inside.write(VERDICT, [f"{verdict.name} {owner_tag}\n".encode()], owner_tag)


def mark(store: Store, listed: Sequence[Listed], step: int, verdict: Verdict) -> list[str]:
    """Write a user's verdict on a step into its checkpoints; return their folders."""
    of_step = [checkpoint for checkpoint in listed if checkpoint.step == step]
    for checkpoint in of_step:
        write_verdict(store.at(checkpoint.folder), checkpoint.card.attempt, checkpoint.card.owner, verdict)
    return [checkpoint.folder for checkpoint in of_step]


def new_folder(store: Store, step: int) -> str:
    """Return a folder name for a checkpoint that is free, or has an empty folder."""
    name = f"step-{step:08d}"
    matches = [match for folder in store.names() if (match := _STEP.fullmatch(folder)) is not None]
    taken = [int(match[2] or 0) for match in matches if int(match[1]) == step]
    if not taken or (taken == [0] and _names(store.at(name)) == []):
        return name
    return f"{name}.{max(taken) + 1}"


def _names(inside: Store) -> list[str] | None:
    try:
        return inside.names()
    except (NotADirectoryError, PermissionError):
        return None


def read_index(inside: Store, listed: Listed) -> bytes:
    """Read the index of the file that commits a checkpoint; ``inside`` is its folder. Raises CorruptSlot."""
    card = listed.card
    raw = inside.read(listed.master, card.index_start, card.index_nbytes)
    if len(raw) != card.index_nbytes or xxhash.xxh3_64_intdigest(raw) != card.index_check:
        raise CorruptSlot(f"{inside.path}/{listed.master} is damaged", step=card.step)
    return raw


def surplus(listed: Sequence[Listed], owner: str, keep_last: int, keep_every: int) -> list[Listed]:
    """List the checkpoints of this job that need not be kept.

    Args:
        owner: only those of this job are listed, see `config.Config.owner`.
        keep_last: this many of the newest are kept, and the newest certified one; 0: all are kept. Those that are
            marked bad do not count, and go when they are older than those.
        keep_every: all whose step is a multiple of this are kept, too; 0: no others.
    """
    if not keep_last:
        return []
    own = [checkpoint for checkpoint in listed if checkpoint.card.owner == owner]
    own.sort(key=lambda checkpoint: checkpoint.age, reverse=True)
    bad = [checkpoint for checkpoint in own if checkpoint.verdict is Verdict.BAD]
    good = [checkpoint for checkpoint in own if checkpoint.verdict is not Verdict.BAD]
    # If a step was drained twice, the older checkpoint of the two is of no use: it does not count, and is not kept.
    newest = {checkpoint.step: checkpoint for checkpoint in reversed(good)}
    useful = [checkpoint for checkpoint in good if newest[checkpoint.step] is checkpoint]
    certified = next((checkpoint for checkpoint in useful if checkpoint.verdict.is_certified), None)
    last = useful[:keep_last]
    kept = [*last, *([] if certified is None else [certified])]
    kept += [checkpoint for checkpoint in bad if len(last) < keep_last or checkpoint.age > last[-1].age]
    kept += [checkpoint for checkpoint in useful if keep_every and checkpoint.step % keep_every == 0]
    return [checkpoint for checkpoint in own if checkpoint not in kept]


def delete(store: Store, listed: Listed) -> None:
    """Delete a checkpoint: first the file that commits it. Files of others, and then its folder, stay."""
    inside = store.at(listed.folder)
    names = [name for name in inside.names() if name != listed.master]
    is_own = each(lambda name: _is_of(inside, name, listed.card), names)
    inside.remove(listed.master)
    reach("drain.uncommitted")
    _remove(inside, [name for name, own in zip(names, is_own, strict=True) if own])
    if not inside.remove_directory():
        log.warning("%s stays: there are files in it that this job did not write", inside.path)


def delete_leftovers(store: Store, owner: str, run_id: bytes) -> None:
    """Delete what interrupted drains of earlier runs of this job left."""
    for folder in store.names():
        inside = store.at(folder)
        if step_of(folder) is None:
            continue
        names = _names(inside) or []
        if any(master in names for master in MASTERS):
            continue
        leftovers = _leftovers_in(inside, names, owner, run_id)
        _remove(inside, leftovers)
        if leftovers:
            inside.remove_directory()


def _leftovers_in(inside: Store, names: list[str], owner: str, run_id: bytes) -> list[str]:
    leftovers: list[str] = []
    drains: dict[Attempt, Card] = {}
    for name, card in zip(names, each(lambda name: _card_of(inside, name), names), strict=True):
        if (match := _TEMPORARY.fullmatch(name)) is not None:  # its card may not be written yet
            if match["owner"] == _digest(owner) and match["run"] != run_id.hex():
                leftovers.append(name)
        elif card is not None and card.owner == owner and card.attempt.run_id != run_id:
            drains[card.attempt] = card
    is_own = each(lambda name: any(_is_of(inside, name, card) for card in drains.values()), names)
    return list(dict.fromkeys([*leftovers, *(name for name, own in zip(names, is_own, strict=True) if own)]))


def _remove(inside: Store, names: list[str]) -> None:
    """Delete files: first those that make PyTorch see a checkpoint, last those that say whose the others are."""
    for turn in range(3):
        each(inside.remove, [name for name in names if _turn(name) == turn])


def _turn(name: str) -> int:
    return 1 if DATA_NAME.fullmatch(name) or name == PROVENANCE else 2 if name.startswith("rank-") else 0


def _is_of(inside: Store, name: str, of: Card) -> bool:
    """Whether the drain of a card has written a file, by its own card, that of its rank, or its temporary name."""
    if (match := _TEMPORARY.fullmatch(name)) is not None:
        return match["tag"] == tag(of.attempt, of.owner)
    if name in (".metadata", VERDICT, PROVENANCE, SIGNATURE):
        try:
            content = inside.read(PROVENANCE if name == SIGNATURE else name)
        except (FileNotFoundError, PermissionError):
            return False
        return tag(of.attempt, of.owner).encode() in content
    rank = DATA_NAME.fullmatch(name)
    card = _card_of(inside, name if rank is None else f"rank-{int(rank[1]):05d}.mlflash")
    return card is not None and (card.attempt, card.owner) == (of.attempt, of.owner)


def _card_of(inside: Store, name: str) -> Card | None:
    if not FILE_NAME.fullmatch(name):
        return None
    try:
        return read_card(inside.read(name, 0, CARD_NBYTES))
    except (CorruptSlot, OSError):
        return None
