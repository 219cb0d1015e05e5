"""What a process hands in to a drain → what each rank's file gets.

What all ranks hold alike, and what sets of them share, is dealt out, so that it is written once (see `work_division`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from ..crash_points import reach
from ..memory.slot_header import Attempt
from ..redundancy.rank_checkpoint import RankCheckpoint
from ..state.layout import PAGE_NBYTES
from ..state.leaves import Entry
from ..state.rebuild import Read
from .file_index import Index, Piece, encode, first_names
from .work_division import deal, digest, part_of


@dataclasses.dataclass
class DrainInput:
    """Ranks of a checkpoint that a process hands in.

    Attributes:
        attempt, step, world_size, mark: of the checkpoint.
        open: gives its ranks, one or several, each with the shares it needs; called on the thread that drains.
        homes: those, once they are open; verified while they are drained.
    """

    attempt: Attempt
    step: int
    world_size: int
    open: Callable[[], dict[int, RankCheckpoint]]
    mark: int = 0
    homes: dict[int, RankCheckpoint] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Look:
    """What a process can say of what it hands in, before it hears of the others'.

    Attributes:
        digests: for each rank those of its whole tensors, and the numbers of their entries.
        table: those of the lowest rank, in order.
        sets: of each rank that shares state, the lowest of the ranks it shares it with.
    """

    digests: dict[int, dict[bytes, int]]
    table: list[bytes]
    sets: dict[int, int]


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a tensor that goes into a file.

    Attributes:
        entry: which; ``start`` is where it begins in the tensor.
        tensor: the whole of what the slot has of it.
        common: see `file_index.Piece`.
    """

    entry: Entry
    tensor: Entry
    common: int


@dataclasses.dataclass
class Load:
    """What goes into the file of a rank.

    Attributes:
        parts: of tensors.
        sources: the bytes of each.
        commons: see `file_index.Index`.
        ties: further names of tensors.
        block_nbytes, checks, first_checks: a checksum for each block of each part; and where those of a part begin.
    """

    parts: list[Part]
    sources: list[Callable[[], np.ndarray]]
    commons: list[int]
    ties: dict[str, str]
    block_nbytes: int
    checks: np.ndarray
    first_checks: list[int]

    def pieces(self, starts: Sequence[int | None]) -> tuple[Piece, ...]:
        """The parts as pieces of a file, told where each begins there; None: it is compressed."""
        return tuple(
            Piece(dataclasses.replace(part.entry, start=start or 0), part.common, first, start is None)
            for part, start, first in zip(self.parts, starts, self.first_checks, strict=True)
        )

    def index(self, home: RankCheckpoint, data: str, starts: Sequence[int | None]) -> tuple[bytes, Index]:
        """What the file says of itself, encoded and not."""
        pieces, header = self.pieces(starts), home.header
        raw = home.slot.view[PAGE_NBYTES : PAGE_NBYTES + header.manifest_nbytes].tobytes()
        text = encode(raw, header.extents.payload_nbytes, self.commons, data, pieces, self.block_nbytes, self.checks)
        return text, Index(home.manifest, tuple(self.commons), data, pieces, self.block_nbytes, self.checks)


def look(drain_input: DrainInput) -> Look:
    """Open what is handed in, and make digests of the whole tensors that other ranks may hold alike.

    Not collective.
    """
    drain_input.homes = drain_input.open()
    found = Look({}, [], {})
    for rank, home in sorted(drain_input.homes.items()):
        read, behind = home.reader(), home.header.extents.payload_nbytes
        if home.manifest.shared is not None:
            found.sets[rank] = home.manifest.shared.by
        mine: dict[bytes, int] = {}
        entries = home.manifest.entries
        for number, (entry, first) in enumerate(zip(entries, first_names(entries), strict=True)):
            whole = entry.shape == entry.global_shape and first == entry.name
            if drain_input.world_size > 1 and whole and entry.nbytes and entry.start < behind:
                mine[digest(entry, xxhash.xxh3_128_intdigest(read(entry).data))] = number
        found.digests[rank] = mine
        found.table = found.table or list(mine)
    return found


def load(rank: int, home: RankCheckpoint, common: Sequence[Entry], sets: Mapping[int, int], world_size: int,
         block_nbytes: int) -> Load:  # fmt: skip
    """Say what a rank writes: what only it has, and its part of what several have; every byte of it is verified.

    Not collective.

    Args:
        rank: of the checkpoint.
        home: its slot and shares.
        common: of its entries those that all ranks hold alike, in an order that is the same on all.
        sets: of each rank that shares state, the lowest of the ranks it shares it with.
        world_size: of the checkpoint.
        block_nbytes: bytes per checksum.

    Raises:
        CorruptSlot: a block of the slot or of a share is damaged.
    """
    entries, behind = home.manifest.entries, home.header.extents.payload_nbytes
    names = first_names(entries)
    firsts = [entry for entry, name in zip(entries, names, strict=True) if entry.name == name]
    shared = sorted((e for e in firsts if e.nbytes and e.start >= behind), key=lambda e: e.start)
    alike = {entry.name: 0 for entry in common} | {entry.name: sets[rank] for entry in shared}
    parts = [Part(dataclasses.replace(e, start=0), e, -1) for e in firsts if e.name not in alike]
    siblings = sorted(other for other, by in sets.items() if by == sets.get(rank))
    nth = siblings.index(rank) if shared else 0
    for those, ranks, mine in ((common, world_size, rank), (shared, len(siblings), nth)):
        for number, begin, end in deal(those, ranks, mine) if those else ():
            tensor = those[number]
            parts.append(Part(part_of(tensor, begin, end), tensor, alike[tensor.name]))
    read = home.reader()
    sources = [_source(read, part) for part in parts]
    checks: list[int] = []
    first_checks = []
    for part, source in zip(parts, sources, strict=True):
        first_checks.append(len(checks))
        if part.entry.nbytes:
            raw = source()
            checks += [xxhash.xxh3_64_intdigest(raw[at : at + block_nbytes].data)
                       for at in range(0, raw.nbytes, block_nbytes)]  # fmt: skip
    # Now that the checksums are made: what they were made of is what the slot was sealed with.
    for slot in (home.slot, *home.shares):
        slot.verify()
    reach("drain.verified")
    commons = [alike.get(name, -1) if entry.nbytes else -1 for entry, name in zip(entries, names, strict=True)]
    ties = {entry.name: name for entry, name in zip(entries, names, strict=True) if entry.name != name}
    return Load(parts, sources, commons, ties, block_nbytes, np.array(checks, dtype="<u8"), first_checks)


def _source(read: Read, part: Part) -> Callable[[], np.ndarray]:
    first, last = part.entry.start, part.entry.start + part.entry.nbytes
    return lambda: read(part.tensor)[first:last]


@dataclasses.dataclass
class Receipt:
    """What a rank's files hold, for the file that commits the checkpoint.

    Attributes:
        pieces: of tensors; whether several ranks hold each alike; and one number for its bytes.
        ties: further names of tensors.
        objects: what else its state holds, to be read by people.
        names: of tensors that a DCP plan has written, by what they are called in the file; else it is empty.
        more: what a form of files wants to know besides.
    """

    rank: int
    pieces: list[tuple[Entry, bool, int]]
    ties: dict[str, str]
    objects: Any
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    more: bytes = b""

    @classmethod
    def of(cls, rank: int, its: Index, ties: dict[str, str], objects: Any, names: Mapping[str, str] | None = None
           ) -> Receipt:  # fmt: skip
        """Make it of what a file says of itself."""
        pieces = [(piece.entry, piece.common >= 0, its.check(piece)) for piece in its.pieces]
        return cls(rank, pieces, ties, objects, names or {})


def shown(receipts: Sequence[Receipt]) -> dict[int, list[tuple[str, Entry, bool]]]:
    """The pieces of each rank: of which tensor, and whether that has one value, and not another one on each rank."""
    forms: dict[str, set[tuple[Any, ...]]] = {}
    for receipt in receipts:
        for entry, alike, check in receipt.pieces:
            own = entry.shape == entry.global_shape and not alike
            forms.setdefault(receipt.names.get(entry.name, entry.name), set()).add(
                (entry.kind, entry.dtype, entry.global_shape, check if own else None)
            )
    found: dict[int, list[tuple[str, Entry, bool]]] = {}
    for receipt in receipts:
        named = [(receipt.names.get(entry.name, entry.name), entry) for entry, _, _ in receipt.pieces]
        found[receipt.rank] = [(name, entry, len(forms[name]) == 1) for name, entry in named]
    return found
