"""The provenance of a drained checkpoint: its record, and whether the files match it."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..draining import file_index, provenance
from ..draining.checkpoint_directory import DATA_NAME, FILE_NAME, PROVENANCE, SIGNATURE, VERDICT, Listed
from ..draining.file_index import CARD_NBYTES, Card, read_card
from ..errors import CorruptSlot
from ..human_readable.wording import listed, many
from ..memory.slot_header import Verdict
from ..storage.store import Store

CHUNK_NBYTES = 8 << 20
_NAMED = 4  # hosts in a line

IsGood = Callable[[bytes, bytes], bool]
Key = tuple[IsGood, str]
"""A function that checks a signature of some bytes, and the key as `signatures.public_key` returns it."""


@dataclasses.dataclass
class Found:
    """The provenance of a checkpoint, and what is wrong with it.

    Attributes:
        document: the provenance as it was written. None: it is missing or cannot be used.
        signature: "none", "not checked" (no key was given), "good" or "bad".
        wrong: files, and what is wrong with each.
        has_verdict: whether there is a file with what is known of the values.
    """

    document: dict[str, Any] | None = None
    signature: str = "none"
    wrong: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    has_verdict: bool = False

    def count(self, ranks: int, damaged: Iterable[str]) -> int:
        """Count the files that were checked: those of the ranks, or all that the provenance names."""
        if self.document is None:
            return ranks + len({file for file, _ in self.wrong} | ({VERDICT} if self.has_verdict else set()))
        more = [SIGNATURE] * (self.signature != "none") + [VERDICT] * self.has_verdict
        return len({PROVENANCE, *more, *self.document["files"], *damaged})

    @property
    def said(self) -> dict[str, Any] | None:
        """The document without its list of files, or None."""
        return None if self.document is None else {key: its for key, its in self.document.items() if key != "files"}

    def to_json(self, is_whole: bool) -> dict[str, Any]:
        """Return it as plain values, without its list of files."""
        said = self.said
        return {"said": said, "signature": self.signature, "holds": bool(said and is_whole)}


def find(inside: Store, listed: Listed, key: Key | None = None) -> Found:
    """Read the provenance of a checkpoint, and check it and its signature. `verify_files` checks the files.

    Args:
        inside: folder of the checkpoint.
        listed: the checkpoint.
        key: the key that must have signed it. None: do not check.
    """
    found = Found(has_verdict=listed.verdict is not Verdict.UNKNOWN)
    if not found.has_verdict and _is_there(inside, VERDICT):
        found.wrong.append((VERDICT, "it does not say what is known of this checkpoint"))
    try:
        raw = inside.read(PROVENANCE)
    except OSError as error:
        found.wrong.append((PROVENANCE, _why_unreadable(error)))
        return found
    try:
        document = provenance.read(raw)
    except CorruptSlot as error:
        found.wrong.append((PROVENANCE, str(error)))
        return found
    card = listed.card
    said = document["step"], document["run"], document["generation"], document["world_size"]
    if said != (card.step, card.attempt.run_id.hex(), card.attempt.generation, card.world_size):
        found.wrong.append((PROVENANCE, f"it is of another checkpoint than {listed.master}: of {_which(*said)}, and "
                                        f"that is of {_which_card(card)}"))  # fmt: skip
        return found
    found.document = document
    _check_signature(inside, document, key, found)
    return found


def _check_signature(inside: Store, document: Mapping[str, Any], key: Key | None, found: Found) -> None:
    try:
        signature = inside.read(SIGNATURE)
    except OSError as error:
        if document["signer"]:
            found.wrong.append((SIGNATURE, _why_unreadable(error)))
        elif key is not None:
            found.wrong.append((PROVENANCE, "it is not signed"))
        return
    found.signature = "not checked"
    if key is None:
        return
    is_good, public = key
    found.signature = "good" if is_good(signature, document["digest"].encode()) else "bad"
    if found.signature == "bad":
        same = document["signer"] == public
        found.wrong.append((SIGNATURE, "it is no signature of this provenance" if same else
                            f"another key has signed this: {document['signer'] or 'unknown'}"))  # fmt: skip


def _why_unreadable(error: OSError) -> str:
    return "it is missing" if isinstance(error, FileNotFoundError) else f"it cannot be read: {error}"


def verify_files(inside: Store, listed: Listed, document: Mapping[str, Any], mine: int, among: int
                 ) -> list[tuple[str, str]]:  # fmt: skip
    """Compare files with a provenance. Return the files that differ, and how.

    This reads no tensors, because the checksums of their blocks are compared.

    Args:
        mine, among: this process takes every ``among``-th file, from number ``mine`` on.
    """
    said = document["files"]
    wrong = []
    for name in sorted(said)[mine::among]:
        if why := _difference(inside, listed, name, said[name]):
            wrong.append((name, why))
    if not mine:
        there = {name for name in inside.names() if FILE_NAME.fullmatch(name)}
        wrong += [(name, "it is not among the files of this checkpoint") for name in sorted(there - {*said})]
    return wrong


def _difference(inside: Store, listed: Listed, name: str, said: Mapping[str, Any]) -> str:
    """Say how a file differs from its record; "" if it does not."""
    try:
        nbytes = inside.nbytes(name)
        card = _card(inside, name)
        if card is not None and card.attempt != listed.card.attempt:
            return f"it is of another checkpoint: of {_which_card(card)}"
        if card is not None and name.startswith("rank-") and card.rank != int(re.findall(r"\d+", name)[0]):
            return (
                "it is the file that commits a checkpoint" if card.rank < 0 else f"it is the file of rank {card.rank}"
            )
        if nbytes != said["nbytes"]:
            return f"it has {nbytes} bytes, but had {said['nbytes']} when it was drained"
        made = hashlib.sha256()
        for start, end in _beside(_tensors(inside, name, card, nbytes), nbytes):
            for at in range(start, end, CHUNK_NBYTES):
                made.update(inside.read(name, at, min(CHUNK_NBYTES, end - at)))
    except FileNotFoundError as error:
        return "it is missing" if not _is_there(inside, name) else f"it cannot be read: {error}"
    except (CorruptSlot, OSError) as error:
        return f"it was changed: {error}"
    return "" if made.hexdigest() == said["sha256"] else "it was changed: its SHA-256 is not the one recorded"


def _is_there(inside: Store, name: str) -> bool:
    try:
        inside.nbytes(name)
    except OSError:
        return False
    return True


def _card(inside: Store, name: str) -> Card | None:
    """Return the card of a file. None if files of this kind have no card."""
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
    raw = inside.read(name, card.index_start, card.index_nbytes)
    places, _ = file_index.decode_places(raw, name, nbytes)
    return [(its.start, its.start + its.nbytes) for its in places.of.values() if its.nbytes and not its.packed]


def _beside(tensors: Sequence[tuple[int, int]], nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of a file around its tensors, front to back."""
    at = 0
    for start, end in sorted(tensors):
        if start > at:
            yield at, start
        at = max(at, end)
    if nbytes > at:
        yield at, nbytes


def _which_card(card: Card) -> str:
    return _which(card.step, card.attempt.run_id.hex(), card.attempt.generation, card.world_size)


def _which(step: int, run: str, generation: int, world_size: int) -> str:
    return f"step {step} of {many(world_size, 'rank')}, save {generation} of run {run[:8]}"


def versions_of(document: Mapping[str, Any]) -> str:
    """List the versions in a provenance in one line."""
    return ", ".join(f"{name} {version}" for name, version in document["versions"].items())


def describe(document: Mapping[str, Any]) -> str:
    """Describe a provenance in one line."""
    hosts = [one["host"] for one in document["nodes"]]
    where = listed(hosts, _NAMED)
    versions = versions_of(document)
    by = "" if document["by"] == "job" else f", drained by `mlflash {document['by']}`"
    ranks, saved = many(document["world_size"], "rank"), f"{document['saved'][:19]}Z"
    return (f"step {document['step']} of job {document['job']}: {ranks} on {where or 'no node'}, "
            f"{document['redundancy']}; saved {saved}{by}; {versions}")  # fmt: skip
