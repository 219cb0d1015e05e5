"""Room for one rank's state of one step, inside a segment.

The life of a slot: FREE → BUSY (unsealed, being written) → HOLDS (sealed; may be restored from) → FREE when a newer
attempt was committed. Checksums are made and checked a run of blocks at a time, so that this can be done along with a
transfer.

Its first page has the header that seals it, and three records: commit, restores, and verdict on the values. A parity
file has the same form; `Header.parities` tells it from a slot. All are fixed little-endian structs that end in a
checksum of themselves. A slot whose header does not parse is an empty slot. The commit record is only a receipt: it
does not decide whether a slot may be restored.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import struct
import time
from collections.abc import Callable, Iterable

import numpy as np
import xxhash

from ..errors import CorruptSlot
from ..state.layout import CHECK_NBYTES, PAGE_NBYTES, Extents
from ..state.leaves import Entry
from ..state.manifest import Manifest, decode
from ..state.rebuild import Read
from .copy_threads import ALONE, CopyThreads
from .node_directory import NodeDirectory
from .shared_memory_segment import Segment

_RUN = 16  # blocks that one thread checks at a time
_NOTHING: np.ndarray = np.empty(0, dtype=np.uint8)


class Use(enum.Enum):
    """What a slot is used for now."""

    FREE = "free"
    BUSY = "busy"
    HOLDS = "holds"


class Slot:
    """A slot in a segment."""

    def __init__(self, segment: Segment | None = None, use: Use = Use.FREE):
        self.segment = segment
        self.use = use
        self.drains = False  # whether it is being drained: then it must not be written, whatever its use
        self.lease = 0  # number of the lease by which the trainer has it; 0: it has not
        # what it holds, once sealed or adopted; otherwise None
        self.header: Header | None = None if segment is None else read_header(segment.view)
        self._decoded: tuple[Header, Manifest] | None = None

    @property
    def view(self) -> np.ndarray:
        """All its bytes, ``(nbytes,)`` uint8; empty if there is no segment yet."""
        return _NOTHING if self.segment is None else self.segment.view

    @property
    def nbytes(self) -> int:
        """Bytes of its file; 0 if it has none."""
        return self.view.nbytes

    @property
    def is_ready(self) -> bool:
        """Whether it can be written without waiting for its pages."""
        return self.segment is None or self.segment.ready.is_set()

    def lacks(self, nbytes: int) -> bool:
        """Whether it needs a larger file for so many bytes, or another one because somebody has removed its own."""
        return self.view.nbytes < nbytes or self.is_gone

    @property
    def inode(self) -> int:
        """Inode of its file; 0 if it has none."""
        return 0 if self.segment is None else self.segment.inode

    @property
    def name(self) -> str:
        return "" if self.segment is None else self.segment.name

    @property
    def is_free(self) -> bool:
        return self.use is Use.FREE and not self.drains and not self.is_lent

    @property
    def is_lent(self) -> bool:
        """Whether its file has views on this node; then it must not be written either."""
        return self.segment is not None and self.segment.is_lent

    @property
    def is_gone(self) -> bool:
        return self.segment is not None and self.segment.is_gone

    @property
    def generation(self) -> int:
        """Generation of what it holds; -1 if it holds nothing."""
        return -1 if self.header is None else self.header.attempt.generation

    def unmap(self) -> None:
        if self.segment is not None:
            self.segment.close()
        self.segment, self.header = None, None

    def first_page(self) -> bytes:
        """Its header and records as they are."""
        return self.view[:PAGE_NBYTES].tobytes()

    def stored_header(self) -> Header | None:
        """Read the header once more; None if it is damaged."""
        return read_header(self.view)

    def run(self, extents: Extents, first: int, last: int) -> np.ndarray:
        """Blocks ``first`` to ``last - 1`` of the body, uint8."""
        return self.body(extents)[extents.run(first, last)]

    def body(self, extents: Extents) -> np.ndarray:
        """Manifest and payload, ``(body_nbytes,)`` uint8."""
        return self.view[PAGE_NBYTES : PAGE_NBYTES + extents.body_nbytes]

    def payload(self, extents: Extents) -> np.ndarray:
        """The payload, ``(payload_nbytes,)`` uint8."""
        return self.view[extents.payload_start : PAGE_NBYTES + extents.body_nbytes]

    def table(self, extents: Extents) -> np.ndarray:
        """The block table, ``(blocks,)`` uint64, little-endian."""
        raw = self.view[extents.table_start : extents.table_start + extents.blocks * CHECK_NBYTES]
        return raw.view("<u8")

    def unseal(self) -> None:
        """Forget what the slot holds; always do this first before you write a slot."""
        self.view[:PAGE_NBYTES] = 0
        self.header = None
        self.use = Use.BUSY

    def begin(self, extents: Extents) -> None:
        """Unseal it for a content whose checksums are made along with it: from now on 0 in the table means none yet."""
        self.unseal()
        self.table(extents)[:] = 0
        self.view[: len(BEGUN)] = np.frombuffer(BEGUN, dtype=np.uint8)

    @property
    def is_begun(self) -> bool:
        """Whether it is not sealed, and the checksums in its table that are not 0 are those of its blocks."""
        return self.view[: len(BEGUN)].tobytes() == BEGUN

    def seal(self, header: Header) -> None:
        """Write the header, last of all: from then on the slot can be restored from."""
        packed = np.frombuffer(header.pack(), dtype=np.uint8)
        self.view[8:HEADER_NBYTES] = packed[8:]
        self.view[:8] = packed[:8]  # the magic last: a torn header does not count as a header
        self.header = header

    def incoming(self, extents: Extents) -> Incoming:
        """Where a body and its table arrive from another rank; unseal the slot first, and seal it afterwards."""
        return Incoming(self, extents)

    def workplace(self, extents: Extents) -> Slot:
        """Where a content is made that is written in any order; `store` it afterwards."""
        return self

    def store(self, made: Slot) -> Callable[[], bool | None]:
        """Keep what was made in the `workplace`. Return a function that says whether it is stored; None: not yet."""
        return lambda: True

    def record_commit(self, attempt: Attempt, step: int) -> None:
        """Write the commit record. It is only a receipt: it does not decide whether the slot may be restored."""
        self._record(COMMIT_START, attempt, step)

    def record_restores(self, attempt: Attempt, times: int) -> None:
        self._record(RESTORES_START, attempt, times)

    def record_verdict(self, attempt: Attempt, verdict: Verdict) -> None:
        self._record(VERDICT_START, attempt, verdict)

    @property
    def verdict(self) -> Verdict:
        if self.header is None:
            return Verdict.UNKNOWN
        return read_verdict(self.first_page(), self.header.attempt)

    def _record(self, start: int, attempt: Attempt, number: int) -> None:
        self._write_record(start, pack_record(start, attempt, number, time.time_ns()))

    def _write_record(self, start: int, record: bytes) -> None:
        self.view[start : start + len(record)] = np.frombuffer(record, dtype=np.uint8)

    def check_blocks(self, extents: Extents, first: int, last: int) -> np.ndarray:
        """Checksum blocks ``first`` to ``last - 1`` of the body as they are now: ``(last - first,)`` uint64."""
        return checks_of(self.run(extents, first, last), extents.block_nbytes)

    def bad_blocks(self, extents: Extents, copy_threads: CopyThreads = ALONE) -> list[int]:
        """List the blocks whose bytes do not match the table. Reads the whole body."""
        table = self.table(extents)
        bad: list[int] = []

        def compare(first: int) -> None:
            last = min(first + _RUN, extents.blocks)
            differ = self.check_blocks(extents, first, last) != table[first:last]
            bad.extend(first + int(i) for i in np.flatnonzero(differ))

        copy_threads.run([functools.partial(compare, first) for first in range(0, extents.blocks, _RUN)])
        return sorted(bad)

    def verify_table(self) -> None:
        """Check the block table of a sealed slot against its header. Raises CorruptSlot if it is damaged."""
        header = self.header
        assert header is not None
        if table_check(self.table(header.extents)) != header.table_check:
            raise CorruptSlot(f"the block table of {self.name} is damaged", rank=header.rank,
                              step=header.step)  # fmt: skip

    def verify(self, copy_threads: CopyThreads = ALONE) -> None:
        """Check table and body of a sealed slot, every byte. Raises CorruptSlot, which names the bad blocks."""
        self.verify_table()
        header = self.header
        assert header is not None
        if bad := self.bad_blocks(header.extents, copy_threads):
            raise CorruptSlot(
                f"{len(bad)} of {header.extents.blocks} blocks of {self.name} are damaged, first block {bad[0]}",
                rank=header.rank,
                step=header.step,
            )

    def manifest(self) -> Manifest:
        """Read the manifest of a sealed slot. Raises CorruptSlot if it does not follow the format."""
        header = self.header
        assert header is not None
        if self._decoded is None or self._decoded[0] is not header:
            self._decoded = (header, decode(self.encoded_manifest(), header.extents.payload_nbytes))
        return self._decoded[1]

    def encoded_manifest(self) -> bytes:
        """The manifest of a sealed slot as it is."""
        assert self.header is not None
        nbytes, extents = self.header.manifest_nbytes, self.header.extents
        return self.run(extents, 0, -(-nbytes // extents.block_nbytes))[:nbytes].tobytes()

    def part(self, extents: Extents, first: int, last: int) -> np.ndarray:
        """Bytes ``first`` to ``last - 1`` of the payload, uint8."""
        return self.payload(extents)[first:last]

    def reader(self, extents: Extents | None = None) -> Read:
        """Return the bytes of entries: views, not to outlive the slot's use; ``extents``: if it is being written."""
        if extents is None:
            assert self.header is not None
            extents = self.header.extents
        payload = self.payload(extents)

        def read(entry: Entry) -> np.ndarray:
            return payload[entry.start : entry.start + entry.nbytes]

        return read

    @property
    def committed(self) -> bool:
        if self.header is None:
            return False
        return read_record(self.first_page(), COMMIT_START, self.header.attempt) is not None


class Incoming:
    """Where the body of a slot and its table arrive, a run of blocks at a time.

    Attributes:
        table: the block table, ``(blocks,)`` uint64, to be written.
    """

    def __init__(self, slot: Slot, extents: Extents):
        self._slot, self._extents, self.table = slot, extents, slot.table(extents)

    def place(self, first: int, last: int) -> np.ndarray | None:
        """Where a run of blocks goes, uint8; None: there is no room yet."""
        return self.run(first, last)

    def run(self, first: int, last: int) -> np.ndarray:
        """A run of blocks that has arrived, uint8."""
        return self._slot.run(self._extents, first, last)

    def keep(self, first: int, last: int) -> None:
        """Store a run of blocks that was checked."""

    def end(self) -> None:
        """Note that all of body and table has arrived."""

    @property
    def is_good(self) -> bool | None:
        """Whether all of it is stored; None: that is not known yet."""
        return True


def checks_of(blocks: np.ndarray, block_nbytes: int) -> np.ndarray:
    """Checksums of blocks that follow one another: ``(count,)`` uint64."""
    sums = [xxhash.xxh3_64_intdigest(blocks[at : at + block_nbytes].data)
            for at in range(0, blocks.nbytes, block_nbytes)]  # fmt: skip
    return np.array(sums, dtype="<u8")


def table_check(table: np.ndarray) -> int:
    """Checksum of a block table, as the header holds it."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(table).view(np.uint8).data)


def read_header(view: np.ndarray) -> Header | None:
    """Read the header of a slot; None if it is not sealed or does not fit its file."""
    try:
        header = unpack(view[:HEADER_NBYTES].tobytes())
    except CorruptSlot:
        return None
    return header if header.extents.nbytes <= view.nbytes else None


def close_others(slots: Iterable[Slot], own: Iterable[Slot]) -> None:
    """Close the files of some slots that own slots do not have."""
    own = list(own)
    segments = [slot.segment for slot in own if slot.segment is not None]
    for slot in slots:
        if slot.segment is None and not any(slot is other for other in own):
            slot.unmap()
        elif slot.segment is not None and not any(slot.segment is segment for segment in segments):
            slot.segment.close()


def oldest_free(slots: Iterable[Slot]) -> Slot | None:
    """A slot that may be written; the one with the older content first."""
    return min((slot for slot in slots if slot.is_free), key=lambda slot: slot.generation, default=None)


def remove_file(memory: NodeDirectory, slot: Slot) -> None:
    """Delete the file of a slot, unless that was done already: another rank may have a new file of that name."""
    if not slot.is_gone:
        memory.remove(slot.name)


def leave_behind(memory: NodeDirectory, slots: Iterable[Slot], may_leave: Callable[[Segment], bool]) -> Slot | None:
    """Leave the file of a slot to its views; the slot is free, and gets another file."""
    for slot in slots:
        if slot.use is Use.FREE and not slot.drains and slot.segment is not None and may_leave(slot.segment):
            remove_file(memory, slot)
            slot.unmap()
            return slot
    return None


MAGIC, BEGUN = b"MLFLASH\x00", b"MLFBEGUN"
VERSION = 1
MAX_GROUP = 32  # the most ranks of a group that the header can name

# magic, version, group size, parities, share + 1 | run id, generation, step | rank, world size, node, local rank |
# manifest bytes, manifest room, payload bytes, block bytes, table checksum, unix ns | node, scheme, job | group |
# lowest of the ranks that share state, plus 1; mark of a fresh start
_HEADER = struct.Struct("<8sIHBB 16sQq IIII QQQQQQ 64s16s64s 32I II")
_SUM = struct.Struct("<Q")
HEADER_NBYTES = _HEADER.size + _SUM.size

COMMIT_START = 1024
RESTORES_START = 2048
VERDICT_START = 3072
RECORD_NBYTES = 64
# magic, run id, generation | step or number of restores, unix ns
_RECORD = struct.Struct("<8s16sQqQ8x")
_MAGIC_AT = {COMMIT_START: b"MLFCOMIT", RESTORES_START: b"MLFRSTRD", VERDICT_START: b"MLFVRDCT"}


class Kind(enum.IntEnum):
    """What a file in node memory holds."""

    SLOT = 0  # a rank's state, or a copy of it
    PARITY = 1
    SHARE = 2  # a part of the state that several ranks hold alike


class Verdict(enum.IntEnum):
    """What is known about the values of an attempt, from good to bad; if files differ, the largest counts."""

    UNKNOWN = 0  # they were not checked
    PASSED = 1
    CERTIFIED = 2  # and training continued from it without anything suspect
    SUSPECT = 3
    GOOD = 4  # a user has marked it
    BAD = 5  # a user has marked it, perhaps on one node only

    @property
    def is_certified(self) -> bool:
        return self in (Verdict.CERTIFIED, Verdict.GOOD)


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One try to save: a random id agreed when the Checkpointer started, and a counter that only grows."""

    run_id: bytes
    generation: int


@dataclasses.dataclass(frozen=True)
class Header:
    """What a slot says about itself. It is written last, and that seals the slot."""

    attempt: Attempt
    step: int
    rank: int
    world_size: int
    node_index: int
    local_rank: int
    manifest_nbytes: int
    extents: Extents
    table_check: int
    unix_ns: int
    node: str
    scheme: str
    job: str
    # the ranks that protect each other. With parity: the parity group, in ascending order. With copies: this rank and
    # its partners. Without redundancy: this rank alone
    group: tuple[int, ...]
    parities: int = 0  # for a parity file, how many of its group may be lost; otherwise 0
    # for shared state, which share of it this is, see `shares`; the group is then the rank's siblings. -1: this is the
    # slot of a rank, its copy, or a parity file
    share: int = -1
    # the lowest of the ranks that share this state, or that share what is missing in this slot; -1: none
    shared_by: int = -1
    mark: int = 0  # of the fresh start that the run goes back to, see `config.Config.mark`; 0: no fresh start

    @property
    def kind(self) -> Kind:
        return Kind.PARITY if self.parities else Kind.SHARE if self.share >= 0 else Kind.SLOT

    def pack(self) -> bytes:
        """Encode; the result is `HEADER_NBYTES` long."""
        group = (*self.group, *(0xFFFFFFFF,) * (MAX_GROUP - len(self.group)))
        body = _HEADER.pack(
            MAGIC, VERSION, len(self.group), self.parities, self.share + 1,
            self.attempt.run_id, self.attempt.generation, self.step,
            self.rank, self.world_size, self.node_index, self.local_rank,
            self.manifest_nbytes, self.extents.manifest_room, self.extents.payload_nbytes,
            self.extents.block_nbytes, self.table_check, self.unix_ns,
            self.node.encode()[:64], self.scheme.encode()[:16], self.job.encode()[:64], *group,
            self.shared_by + 1, self.mark,
        )  # fmt: skip
        return body + _SUM.pack(xxhash.xxh3_64_intdigest(body))


def unpack(page: bytes) -> Header:
    """Decode and check a header: the first `HEADER_NBYTES` of a slot. Raises CorruptSlot if it is none, or damaged."""
    if page[:8] != MAGIC:
        raise CorruptSlot("this slot is not sealed", expected=MAGIC, found=bytes(page[:8]))
    body, rest = page[: _HEADER.size], page[_HEADER.size : HEADER_NBYTES]
    if len(rest) != _SUM.size or xxhash.xxh3_64_intdigest(body) != _SUM.unpack(rest)[0]:
        raise CorruptSlot("the header of this slot is damaged: its checksum does not match")
    (_, version, group_size, parities, share, run_id, generation, step, rank, world_size, node_index, local_rank,
     manifest_nbytes, manifest_room, payload_nbytes, block_nbytes, table_check, unix_ns,
     node, scheme, job, *group, shared_by, mark) = _HEADER.unpack(body)  # fmt: skip
    if version != VERSION:
        raise CorruptSlot("this slot was written in another format", expected=VERSION, found=version)
    good = (
        group_size <= MAX_GROUP
        and (parities == 0 or (parities + 2 <= group_size and rank in group[:group_size]))
        and (
            share == 0
            or (parities == 0 and share <= group_size and group[share - 1] == rank and 0 < shared_by <= world_size)
        )
        and rank < world_size
        and manifest_nbytes <= manifest_room
        and manifest_room % PAGE_NBYTES == 0
        and block_nbytes > 0
        and manifest_room + payload_nbytes < 1 << 62
    )
    if not good:
        raise CorruptSlot("the header of this slot contradicts itself")
    return Header(
        Attempt(run_id, generation), step, rank, world_size, node_index, local_rank, manifest_nbytes,
        Extents(manifest_room, payload_nbytes, block_nbytes), table_check, unix_ns,
        _text(node), _text(scheme), _text(job), tuple(group[:group_size]),
        parities, share - 1, shared_by - 1, mark,
    )  # fmt: skip


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")


def pack_record(start: int, attempt: Attempt, number: int, unix_ns: int) -> bytes:
    """Encode a record for offset ``start``; ``number``: the step, how many runs have restored it, or the `Verdict`."""
    body = _RECORD.pack(_MAGIC_AT[start], attempt.run_id, attempt.generation, number, unix_ns)
    return body + _SUM.pack(xxhash.xxh3_64_intdigest(body))


def read_record(page: bytes, start: int, attempt: Attempt) -> int | None:
    """The number in the record at ``start``; None if there is none of this attempt."""
    record = any_record(page, start)
    return None if record is None or record[0] != attempt else record[1]


def any_record(page: bytes, start: int) -> tuple[Attempt, int] | None:
    """The record at ``start``, whatever the header says: its attempt, and its number; None if there is none."""
    record = page[start : start + RECORD_NBYTES]
    body = record[: _RECORD.size]
    if len(record) != RECORD_NBYTES or _SUM.unpack(record[_RECORD.size :])[0] != xxhash.xxh3_64_intdigest(body):
        return None
    magic, run_id, generation, number, _ = _RECORD.unpack(body)
    return (Attempt(run_id, generation), int(number)) if magic == _MAGIC_AT[start] else None


def read_verdict(page: bytes, attempt: Attempt) -> Verdict:
    """What a file says about the values of an attempt."""
    number = read_record(page, VERDICT_START, attempt)
    return Verdict(number) if number in set(Verdict) else Verdict.UNKNOWN
