"""What the nodes hold → which attempt to restore, from where, and who takes over which file.

Pure but for `scan`: every rank computes the same choice from the same table.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from ..errors import CorruptSlot, UnsafePath
from .node_directory import NodeMemory
from .parity_layout import recoverable
from .slot_header import RECORD_NBYTES, RESTORES_START, Attempt, Header, Kind, read_record, unpack

FOUND = np.dtype(
    [("generation", "<u8"), ("run_0", "<u8"), ("run_1", "<u8"), ("step", "<i8"), ("rank", "<u4"),
     ("world_size", "<u4"), ("node", "<u4"), ("file", "<u4"), ("group", "<u4"), ("shared_by", "<i4"), ("kind", "u1"),
     ("number", "u1"), ("shares", "u1"), ("restores", "u1")]
)  # fmt: skip
"""One sealed file: 60 bytes, so that 16,384 ranks with four files each fit into 4 MB.

``number``: how many may be lost, of parity; which share, of shared state, and ``shares`` how many there are. ``group``:
index of a parity group. ``shared_by``: the set of ranks whose shared state it is, or which this slot needs; -1: none.
"""
_ATTEMPT = ["generation", "run_0", "run_1", "step", "world_size"]
_RUN_ID = struct.Struct("<QQ")
_COUNT = struct.Struct("<Q")

Place = tuple[int, int]
"""Node and file number."""


@dataclasses.dataclass(frozen=True)
class Inventory:
    """Sealed files of some nodes.

    Attributes:
        rows: one each, `FOUND`.
        groups: the ranks of parity groups; ``rows["group"]`` of a parity file is an index into them.
    """

    rows: np.ndarray
    groups: tuple[tuple[int, ...], ...] = ()

    def attempts(self) -> list[tuple[Attempt, int, int]]:
        """List the attempts as ``(attempt, step, world size)``, newest first."""
        # Sorted by columns: np.unique compares rows of several fields one by one, twenty times slower.
        order = np.lexsort([self.rows[name] for name in reversed(_ATTEMPT)])
        rows = self.rows[_ATTEMPT][order]
        unique = rows[np.concatenate([rows[:1] == rows[:1], rows[1:] != rows[:-1]])].tolist()
        return [(Attempt(_RUN_ID.pack(a, b), g), step, size) for g, a, b, step, size in reversed(unique)]

    def of(self, attempt: Attempt) -> Inventory:
        """What there is of one attempt."""
        first, second = _RUN_ID.unpack(attempt.run_id)
        rows = self.rows
        mine = (rows["generation"] == attempt.generation) & (rows["run_0"] == first) & (rows["run_1"] == second)
        return Inventory(rows[mine], self.groups)

    def since(self, generation: int) -> Inventory:
        """What there is of attempts of this generation and newer ones."""
        return Inventory(self.rows[self.rows["generation"] >= generation], self.groups)

    def on(self, node: int) -> Inventory:
        """What there is on one node."""
        return Inventory(self.rows[self.rows["node"] == node], self.groups)

    def without(self, places: Iterable[Place]) -> Inventory:
        """All but some files."""
        rows = self.rows
        for node, file in places:
            rows = rows[(rows["node"] != node) | (rows["file"] != file)]
        return Inventory(rows, self.groups)


def join(parts: Sequence[Inventory]) -> Inventory:
    """Put the inventories of several nodes together."""
    # As bytes, in one go: numpy takes longer to look at the fields of 16,384 small arrays than to copy all they hold.
    rows = np.frombuffer(bytearray(b"".join([part.rows.tobytes() for part in parts])), dtype=FOUND)
    groups: dict[tuple[int, ...], int] = {}
    every = itertools.chain.from_iterable(part.groups for part in parts)
    number_of = np.array([groups.setdefault(group, len(groups)) for group in every], dtype="<u4")
    first = np.cumsum([0, *(len(part.groups) for part in parts)])[:-1]
    parity = rows["kind"] == Kind.PARITY
    first_of_row = np.repeat(first, [part.rows.size for part in parts])[parity]
    rows["group"][parity] = number_of[first_of_row + rows["group"][parity]]
    return Inventory(rows, tuple(groups))


def encode(found: Inventory) -> bytes:
    """Encode an inventory for its way to the other nodes. Not collective.

    Column by column and compressed, since most of it repeats: the files of 8 ranks with rs:6+2 take 270 bytes
    instead of the 2,400 of a pickle, and those of 16,384 ranks 0.5 MB instead of 5.
    """
    columns = np.frombuffer(found.rows.tobytes(), dtype=np.uint8).reshape(-1, FOUND.itemsize).T.tobytes()
    groups = np.array([word for group in found.groups for word in (len(group), *group)], dtype="<u4").tobytes()
    return zlib.compress(_COUNT.pack(found.rows.size) + columns + groups, 1)


def decode(packed: bytes) -> Inventory:
    """Decode what `encode` gave. Not collective."""
    raw = zlib.decompress(packed)
    end = _COUNT.size + FOUND.itemsize * _COUNT.unpack_from(raw)[0]
    columns = np.frombuffer(raw[_COUNT.size : end], dtype=np.uint8).reshape(FOUND.itemsize, -1)
    words = iter(np.frombuffer(raw[end:], dtype="<u4").tolist())
    groups = tuple(tuple(itertools.islice(words, length)) for length in words)
    return Inventory(np.frombuffer(columns.T.tobytes(), dtype=FOUND), groups)


@dataclasses.dataclass(frozen=True)
class ParityGroup:
    """The parity files of a group that are there, for one attempt.

    Attributes:
        ranks: of the group, ascending.
        losses: how many of them may be lost.
        files: of each rank in turn, where its parity is; None: gone.
    """

    ranks: tuple[int, ...]
    losses: int
    files: tuple[Place | None, ...]


@dataclasses.dataclass(frozen=True)
class Choice:
    """An attempt that can be restored.

    Attributes:
        source: of each rank, where its slot is; None: it has to be rebuilt.
        rebuilt: the group of each rank whose slot has to be rebuilt.
        parity: all groups of which there are parity files.
        shares: of shared state, by number of the set and of the share, where its files are: on several nodes.
        restores: how many runs have restored the attempt so far.
    """

    attempt: Attempt
    step: int
    world_size: int
    source: tuple[Place | None, ...]
    restores: int = 0
    rebuilt: Mapping[int, ParityGroup] = dataclasses.field(default_factory=dict)
    parity: tuple[ParityGroup, ...] = ()
    shares: Mapping[tuple[int, int], tuple[Place, ...]] = dataclasses.field(default_factory=dict)

    def group_of(self, rank: int) -> ParityGroup | None:
        """The group that can repair a rank's slot; None where there is none."""
        known = self.rebuilt.get(rank)
        return known or next((group for group in self.parity if rank in group.ranks), None)


def file_number(name: str) -> int:
    """``file_number("slot-0007") == 7``."""
    return int(name.removeprefix("slot-"))


def file_name(number: int) -> str:
    """``file_name(7) == "slot-0007"``."""
    return f"slot-{number:04d}"


def first_pages(memory: NodeMemory) -> Iterator[tuple[str, bytes, int]]:
    """Give of each slot file of this node its name, header and records as they are, and its size. Not collective."""
    for name in memory.slot_names():
        try:
            fd = memory.open(name, os.O_RDONLY)
        except (UnsafePath, FileNotFoundError):
            continue
        try:
            page, nbytes = os.pread(fd, RESTORES_START + RECORD_NBYTES, 0), os.fstat(fd).st_size
        finally:
            os.close(fd)
        yield name, page, nbytes


def scan(memory: NodeMemory, node: int) -> Inventory:
    """List the sealed files of this node by their headers. Not collective.

    Files that are not private files of this user are left alone, as if they were not there.
    """
    found = []
    for name, page, nbytes in first_pages(memory):
        try:
            header = unpack(page)
        except CorruptSlot:
            continue
        if header.extents.nbytes <= nbytes:
            found.append((name, header, read_record(page, RESTORES_START, header.attempt) or 0))
    return of_headers(found, node)


def of_headers(found: Iterable[tuple[str, Header, int]], node: int) -> Inventory:
    """List sealed files of a node, given the name and the header of each, and how many runs have restored it."""
    rows = []
    groups: dict[tuple[int, ...], int] = {}
    for name, header, restores in found:
        kind = header.kind
        group = groups.setdefault(header.group, len(groups)) if kind is Kind.PARITY else 0
        rows.append((
            header.attempt.generation, *_RUN_ID.unpack(header.attempt.run_id), header.step, header.rank,
            header.world_size, node, file_number(name), group, header.shared_by, kind,
            header.share if kind is Kind.SHARE else header.parities, len(header.group), min(restores, 255),
        ))  # fmt: skip
    return Inventory(np.array(rows, dtype=FOUND), tuple(groups))


def choose(found: Inventory, node_of: Sequence[int], step: int | None = None, skip_stuck: int = 0) -> Choice | None:
    """Choose the newest attempt of which there is a slot for every rank, or parity that gives it back.

    Whether it was committed is not asked: an attempt that is sealed everywhere rolls forward.

    Args:
        found: all sealed files of all nodes.
        node_of: node of each rank now; a slot on the rank's own node is preferred, then the lowest node.
        step: only attempts of this step.
        skip_stuck: pass over attempts that so many runs have restored, where there is an older one; 0: never.
    """
    newest_stuck: Choice | None = None
    for attempt, its_step, world_size in found.attempts():
        if step is not None and its_step != step:
            continue
        if newest_stuck is not None and world_size != newest_stuck.world_size:
            continue
        choice = _sources(found.of(attempt), attempt, its_step, world_size, node_of)
        if choice is None:
            continue
        if not skip_stuck or choice.restores < skip_stuck:
            return choice
        newest_stuck = newest_stuck or choice
    return newest_stuck


def _sources(found: Inventory, attempt: Attempt, step: int, world_size: int, node_of: Sequence[int]) -> Choice | None:
    """Where each rank's slot of an attempt is, or how it is rebuilt; None where one is nowhere."""
    slots: dict[int, Place] = {}
    parity: dict[tuple[int, int], dict[int, Place]] = collections.defaultdict(dict)
    rows = found.rows[np.lexsort([found.rows[name] for name in ("file", "node", "rank")])]
    shares: dict[tuple[int, int], list[Place]] = {}
    columns = [rows[name].tolist() for name in ("rank", "node", "file", "group", "shared_by", "kind", "number")]
    is_share, is_parity, size = int(Kind.SHARE), int(Kind.PARITY), len(node_of)  # looked up once, not for each file
    for rank, node, file, group, set_of, kind, number in zip(*columns, strict=True):
        if kind == is_share:
            shares.setdefault((set_of, number), []).append((node, file))
            continue
        known = parity[group, number] if kind == is_parity else slots
        if rank not in known or (rank < size and node_of[rank] == node and known[rank][0] != node):
            known[rank] = (node, file)
    groups = tuple(
        ParityGroup(found.groups[number], losses, tuple(files.get(rank) for rank in found.groups[number]))
        for (number, losses), files in parity.items()
    )
    rebuilt: dict[int, ParityGroup] = {}
    if missing := set(range(world_size)) - slots.keys():
        for group in groups:
            no_slot = [nth for nth, rank in enumerate(group.ranks) if rank in missing]
            if not no_slot:
                continue
            no_parity = [nth for nth, place in enumerate(group.files) if place is None]
            if recoverable(len(group.ranks), group.losses, no_slot, no_parity):
                rebuilt |= {group.ranks[nth]: group for nth in no_slot if group.ranks[nth] not in rebuilt}
    if missing - rebuilt.keys() or not _shares_complete(rows, shares):
        return None
    restores = int(found.rows["restores"].max())
    source = tuple(slots.get(rank) for rank in range(world_size))
    places = {share: tuple(found) for share, found in shares.items()}
    return Choice(attempt, step, world_size, source, restores, rebuilt, groups, places)


def _shares_complete(rows: np.ndarray, shares: Mapping[tuple[int, int], object]) -> bool:
    """Whether there is a file of every share of all state that is shared."""
    files = rows[rows["kind"] == Kind.SHARE]
    counts = dict(zip(files["shared_by"].tolist(), files["shares"].tolist(), strict=True))
    needed = set(rows["shared_by"].tolist()) - {-1}
    return all((number, share) in shares for number in needed for share in range(counts.get(number, 1)))


@dataclasses.dataclass
class Files:
    """The files that a rank takes over: numbers, or None where there is none yet.

    The first of each pair is the one for the attempt that was chosen, the next one for the next save.

    Attributes:
        own: the rank's slots.
        inbox: by owner, copies of another rank's slots; under the rank's own number, its parity files.
        share: of shared state.
    """

    own: list[int | None]
    inbox: dict[int, list[int | None]]
    share: list[int | None]


def assign(
    found: Inventory,
    names: Sequence[str],
    node: int,
    chosen: Attempt | None,
    same_ranks: bool,
    inboxes: Mapping[int, Sequence[int]],
    shares: Mapping[int, tuple[int, int]],
    own: int = 2,
) -> tuple[dict[int, Files], list[int]]:
    """Share the files of a node out among its ranks, so that ranks that moved do not double the memory.

    A file of the chosen attempt goes to the rank whose state, whose partner's copy, whose parity or whose share of
    shared state it is; the others of that attempt come last, since they must not be written until the redundancy is
    whole in its new places.

    Args:
        found: all sealed files of all nodes.
        names: all slot files of this node, sealed or not.
        node: index of this node.
        chosen: the attempt that must be kept.
        same_ranks: whether that attempt's ranks are the ranks of today (same world size).
        inboxes: for each rank of this node, the ranks whose copies it holds, and itself where it holds parity.
        shares: for each rank of this node that stores a share of shared state, the numbers of set and share.
        own: how many slots of its own, and for its share, a rank has.

    Returns:
        The files of each rank here, and the numbers of those left over (to be deleted once the redundancy is
        whole in its new places).
    """
    here = found.on(node)
    content: dict[int, tuple[Kind, object]] = {}
    for row in here.rows:
        kind = Kind(row["kind"])
        of_share = (int(row["shared_by"]), int(row["number"]))
        content[int(row["file"])] = (kind, of_share if kind is Kind.SHARE else int(row["rank"]))
    kept = {int(file) for file in here.of(chosen).rows["file"]} if chosen else set()
    unused = sorted(file_number(name) for name in names)

    def take(is_kept: bool, kind: Kind, what: object = None) -> int | None:
        """Take the first file of a kind, or one that holds nothing; with ``what``, the one that holds that."""
        for number in unused:
            its_kind, holds = content.get(number, (kind, None))
            if (number in kept) is is_kept and its_kind is kind and what in (None, holds):
                unused.remove(number)
                return number
        return None

    files = {
        rank: Files([None] * own, {owner: [None, None] for owner in inboxes[rank]}, [None] * own) for rank in inboxes
    }
    pairs: list[tuple[tuple[Kind, object], list[int | None]]]
    pairs = [((Kind.SLOT, rank), files[rank].own) for rank in inboxes]
    pairs += [
        ((Kind.PARITY if owner == rank else Kind.SLOT, owner), pair)
        for rank in inboxes
        for owner, pair in files[rank].inbox.items()
    ]
    pairs += [((Kind.SHARE, shares[rank]), files[rank].share) for rank in inboxes if rank in shares]
    if same_ranks:
        for (kind, what), pair in pairs:
            pair[0] = take(True, kind, what)
    for index in range(max(2, own)):
        those = [(content, pair) for content, pair in pairs if index < len(pair)]
        for (kind, what), pair in those:
            if pair[index] is None:
                pair[index] = take(False, kind, what)
        for (kind, _), pair in those:
            if pair[index] is None:  # a parity file is no place for a slot, nor the other way: the sizes differ
                pair[index] = take(False, kind)
    for (kind, _), pair in pairs:
        if pair[1] is None and pair[0] not in kept:  # one of the two can always be written
            pair[1] = take(True, kind)
    return files, unused
