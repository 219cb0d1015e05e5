"""What a process hands in to a drain → what goes into each rank's file, whatever its format.

What all ranks hold alike, and what sets of them share, is divided, so that it is written once.

As HDF5 a rank has one file, which begins with its card. DCP's files have no room for a card: there the card and the
index are files of their own, and so is the file that commits the checkpoint.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
import xxhash

from ..channel.describe_ranks import Described
from ..crash_points import reach
from ..memory.slot import Attempt, Verdict
from ..protect.rank_checkpoint import RankCheckpoint
from ..state.leaves import Entry, apart, ties_of
from ..state.rebuild import Read
from ..storage.file_holes import FileWithHoles, Source
from .index import CARD_NBYTES, Card, Place, Places, RankFiles, encode_index, first_names, numbers_of, rows_of

_CHECK = (1 << 64) - 1  # keeps 64 of 128 bits
_UNDIVIDED_NBYTES = 1 << 20  # smaller tensors are not divided
Rows = tuple[int, int, int]  # number of a tensor, first row, row after the last


@dataclasses.dataclass
class DrainInput:
    """The ranks of a checkpoint that a process hands in."""

    attempt: Attempt
    step: int
    world_size: int
    open: Callable[[], dict[int, RankCheckpoint]]  # each with the shares it needs; called on the thread that drains
    mark: int = 0
    homes: dict[int, RankCheckpoint] = dataclasses.field(default_factory=dict)  # once open; verified while drained
    by: str = "job"  # or "scavenge"
    checks: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    verdict: Callable[[], Verdict] = lambda: Verdict.UNKNOWN  # known by now; a user may mark it while it is drained


@dataclasses.dataclass
class Survey:
    """What a process knows about its part before it hears from the others."""

    digests: dict[int, dict[bytes, int]]  # for each rank, of its whole tensors, with the numbers of their entries
    table: list[bytes]  # the digests of the lowest rank, in order
    sets: dict[int, int]  # for each rank that shares state, the lowest of the ranks that it shares it with
    # for each rank, 64 bits made of the bytes of each whole tensor that is not shared, by number
    checks: dict[int, dict[int, int]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a tensor that goes into a file."""

    entry: Entry
    tensor: Entry
    common: int  # the lowest of the ranks that hold it alike; -1: only this one does


@dataclasses.dataclass
class RankContent:
    """What goes into the file of a rank."""

    home: RankCheckpoint
    parts: list[Part]
    sources: list[Source]
    commons: list[int]  # for each entry of the slot, the lowest of the ranks that hold it alike; -1: only this one does
    rank: Described
    ties: dict[str, str]
    block_nbytes: int
    checks: np.ndarray  # one for each block of each part
    first_checks: list[int]  # where the checksums of each part begin

    def places(self, data: str, starts: Sequence[int | None]) -> Places:
        """Where the parts are in a file, given where each begins there; None: it is compressed."""
        numbers = numbers_of(self.home.manifest.entries)
        place_of = {}
        for part, start, first in zip(self.parts, starts, self.first_checks, strict=True):
            entry, tensor = part.entry, part.tensor
            begin, rows = (entry.offset[0] - tensor.offset[0], entry.shape[0]) if entry.shape else (0, 1)
            place_of[numbers[entry.name]] = Place(start or 0, entry.nbytes, begin, rows, first, start is None)
        return Places(data, self.block_nbytes, self.checks, place_of)

    def index(self, places: Places) -> tuple[bytes, int]:
        """The encoded index of the file, and how many bytes of it say where everything is."""
        home = self.home
        return encode_index(home.slot.encoded_manifest(), home.header.extents.payload_nbytes, places)


def survey_of(drain_input: DrainInput) -> Survey:
    """Open what is handed in, and make digests of the whole tensors that other ranks may hold alike."""
    drain_input.homes = drain_input.open()
    survey = Survey({}, [], {})
    for rank, home in sorted(drain_input.homes.items()):
        read, behind = home.reader(), home.header.extents.payload_nbytes
        if home.manifest.shared is not None:
            survey.sets[rank] = home.manifest.shared.by
        digests: dict[bytes, int] = {}
        entries = home.manifest.entries
        checks = survey.checks.setdefault(rank, {})
        for number, (entry, first) in enumerate(zip(entries, ties_of(entries), strict=True)):
            is_shared = entry.nbytes and entry.start >= behind
            if drain_input.world_size == 1 or entry.shape != entry.global_shape or is_shared:
                continue
            if first == number:
                content = xxhash.xxh3_128_intdigest(read(entry).data) if entry.nbytes else 0
                if entry.nbytes:
                    digests[digest(entry, content)] = number
            checks[number] = checks[first] if first != number else content & _CHECK
        survey.digests[rank] = digests
        survey.table = survey.table or list(digests)
    return survey


def content_of(rank: int, home: RankCheckpoint, common: Sequence[Entry], survey: Survey, sets: Mapping[int, int],
               world_size: int, block_nbytes: int) -> RankContent:  # fmt: skip
    """Return what a rank writes: what only it holds, and its part of what several hold, all of it verified."""
    entries, behind = home.manifest.entries, home.header.extents.payload_nbytes
    names = first_names(entries)
    firsts = [entry for entry, name in zip(entries, names, strict=True) if entry.name == name]
    shared = sorted((e for e in firsts if e.nbytes and e.start >= behind), key=lambda e: e.start)
    alike = {entry.name: 0 for entry in common} | {entry.name: sets[rank] for entry in shared}
    parts = [Part(msgspec.structs.replace(e, start=0), e, -1) for e in firsts if e.name not in alike]
    siblings = sorted(other for other, by in sets.items() if by == sets.get(rank))
    nth = siblings.index(rank) if shared else 0
    begins = []
    for tensors, ranks, nth_rank in ((common, world_size, rank), (shared, len(siblings), nth)):
        dealt = list(divide(tensors, ranks, nth_rank)) if tensors else []
        begins.append(_position(tensors, *dealt[0][:2]) if dealt else -1)
        for number, begin, end in dealt:
            tensor = tensors[number]
            parts.append(Part(part_of(tensor, begin, end), tensor, alike[tensor.name]))
    read = home.reader()
    known = survey.checks[rank] | (_checks_of_shared(entries, behind, read) if len(siblings) < world_size else {})
    described = Described.of(entries, home.manifest.tree, home.manifest.plain, known,
                             (sets.get(rank, -1) if shared else -1, *begins))  # fmt: skip
    numbers = numbers_of(entries)
    in_order = [tuple(numbers[entry.name] for entry in tensors) for tensors in (common, shared)]
    structure = dataclasses.replace(described.structure, alike=in_order[0], shared=in_order[1])
    described = dataclasses.replace(described, structure=structure)
    sources = [_source(read, part) for part in parts]
    checks: list[int] = []
    first_checks = []
    for part, source in zip(parts, sources, strict=True):
        first_checks.append(len(checks))
        if part.entry.nbytes:
            raw = source()
            checks += [xxhash.xxh3_64_intdigest(raw[at : at + block_nbytes].data)
                       for at in range(0, raw.nbytes, block_nbytes)]  # fmt: skip
    # Verify the slot after the checksums were made: then they belong to the bytes with which it was sealed.
    for slot in (home.slot, *home.shares):
        slot.verify()
    reach("drain.verified")
    commons = [alike.get(name, -1) if entry.nbytes else -1 for entry, name in zip(entries, names, strict=True)]
    ties = {entry.name: name for entry, name in zip(entries, names, strict=True) if entry.name != name}
    sums = np.array(checks, dtype="<u8")
    return RankContent(home, parts, sources, commons, described, ties, block_nbytes, sums, first_checks)


def _position(entries: Sequence[Entry], number: int, row: int) -> int:
    last = entries[number]
    return sum(entry.nbytes for entry in entries[:number]) + row * (last.nbytes // last.shape[0] if last.shape else 0)


def _checks_of_shared(entries: Sequence[Entry], behind: int, read: Read) -> dict[int, int]:
    """Checksums of whole tensors that other sets of ranks may share, too."""
    return {number: xxhash.xxh3_128_intdigest(read(entry).data) & _CHECK for number, entry in enumerate(entries)
            if entry.nbytes and entry.start >= behind and entry.shape == entry.global_shape}  # fmt: skip


def _source(read: Read, part: Part) -> Source:
    first, last = part.entry.start, part.entry.start + part.entry.nbytes
    return lambda: read(part.tensor)[first:last]


@dataclasses.dataclass(frozen=True)
class FileDigest:
    """The digest of a file of a checkpoint."""

    name: str
    nbytes: int
    sha256: str  # of those of its bytes that belong to no tensor, see `FileWithHoles.digest_beside_tensors`


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where and when the state of a rank was saved."""

    node_index: int
    node: str
    scheme: str
    unix_ns: int  # when its slot was sealed
    # the provenance in its manifest; only for the lowest rank, because it is the same on the others
    provenance: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, home: RankCheckpoint) -> Origin:
        header, provenance = home.header, home.manifest.provenance
        return cls(header.node_index, header.node, header.scheme, header.unix_ns, {} if header.rank else provenance)


@dataclasses.dataclass
class Receipt:
    """What a rank's files hold, for the file that commits the checkpoint."""

    rank: int
    files: RankFiles
    pieces: list[tuple[Entry, bool, int]]  # whether several ranks hold each alike; one number made of its bytes
    ties: dict[str, str]
    objects: Any
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    more: bytes = b""
    origin: Origin | None = None
    digests: tuple[FileDigest, ...] = ()


def shown(receipts: Sequence[Receipt]) -> dict[int, list[tuple[str, Entry, bool]]]:
    """For each rank its pieces: of which tensor, and whether the tensor has one value, and not another on each rank."""
    forms: dict[str, set[tuple[Any, ...]]] = {}
    name_of = apart((entry.name, entry.mesh) for receipt in receipts for entry, _, _ in receipt.pieces)

    def shown_as(receipt: Receipt, entry: Entry) -> str:
        return receipt.names.get(entry.name) or name_of(entry.name, entry.mesh)

    for receipt in receipts:
        for entry, alike, check in receipt.pieces:
            own = entry.shape == entry.global_shape and not alike
            forms.setdefault(shown_as(receipt, entry), set()).add(
                (entry.kind, entry.dtype, entry.global_shape, check if own else None)
            )
    pieces: dict[int, list[tuple[str, Entry, bool]]] = {}
    for receipt in receipts:
        named = [(shown_as(receipt, entry), entry) for entry, _, _ in receipt.pieces]
        pieces[receipt.rank] = [(name, entry, len(forms[name]) == 1) for name, entry in named]
    return pieces


class FileFormat(Protocol):
    """A file format. Nothing is collective."""

    name: str
    most_pieces: float  # how many pieces, of all ranks, its last file lists; if there are more, it lists none

    def rank_files(self, drain_input: DrainInput, rank: int, content: RankContent, owner: str
                   ) -> tuple[list[tuple[str, FileWithHoles]], Receipt]:  # fmt: skip
        """Lay out the files of a rank, in the order in which they are to be written."""

    def master_files(
        self, drain_input: DrainInput, text: bytes, receipts: Sequence[Receipt], job: str, owner: str
    ) -> list[tuple[str, FileWithHoles]]:
        """Lay out what is written last; the very last file commits the checkpoint, and has this index."""


def plain_file(drain_input: DrainInput, rank: int, owner: str, text: bytes) -> tuple[FileWithHoles, Card]:
    """Make a file that has a card and an index, and nothing else."""
    skeleton = FileWithHoles()
    skeleton.patch(CARD_NBYTES, text)
    return skeleton, add_card(skeleton, drain_input, rank, owner, CARD_NBYTES, text)


def add_card(skeleton: FileWithHoles, drain_input: DrainInput, rank: int, owner: str, start: int, text: bytes) -> Card:
    """Put the card on a file that was laid out and has its index ``text`` at ``start``."""
    card = Card(drain_input.attempt, drain_input.step, rank, drain_input.world_size, skeleton.nbytes, start, len(text),
                xxhash.xxh3_64_intdigest(text), time.time_ns(), owner, drain_input.mark)  # fmt: skip
    skeleton.patch(0, card.pack())
    return card


# What several ranks hold alike is divided, so that each writes about as much and no byte is written twice. A tensor is
# cut along its first dimension only, so that a part is one run of its bytes.


def digest(entry: Entry, content: int) -> bytes:
    """16 bytes for a tensor with its name, dtype, shape and content (its XXH3-128)."""
    text = f"{entry.name}\0{entry.kind}\0{entry.dtype}\0{entry.global_shape}\0{content:x}"
    return xxhash.xxh3_128_digest(text.encode())


def divide(entries: Sequence[Entry], ranks: int, nth: int) -> Iterator[Rows]:
    """Divide tensors among some ranks; return the parts of the nth of them.

    Example:
        Tensors of 10, 10 and 20 MiB for 2 ranks: the first gets the first two, the second the third.
    """
    total = sum(entry.nbytes for entry in entries)
    low, high = total * nth // ranks, total * (nth + 1) // ranks
    at = 0
    for number, entry in enumerate(entries):
        first, at = at, at + entry.nbytes
        rows = entry.shape[0] if entry.shape else 1
        if entry.nbytes < _UNDIVIDED_NBYTES or rows < 2:
            if (low <= first < high) if entry.nbytes else nth == 0:
                yield number, 0, rows
            continue
        row = entry.nbytes // rows
        begin, end = (min(rows, max(0, -(-(bound - first) // row))) for bound in (low, high))
        if begin < end:
            yield number, begin, end


def part_of(entry: Entry, begin: int, end: int) -> Entry:
    """Rows of a tensor, as an entry; ``start`` is where they begin in it."""
    row_nbytes = entry.nbytes // max(1, entry.shape[0]) if entry.shape else 0
    return msgspec.structs.replace(rows_of(entry, begin, end - begin), start=begin * row_nbytes)
