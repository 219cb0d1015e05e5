"""The first page of a slot: the header that seals it, and three records: commit, restores, and verdict on the values.

A parity file has the same form; `Header.parities` tells it from a slot.

All are fixed little-endian structs that end in a checksum of themselves. A slot whose header does not parse is an empty
slot. The commit record is only a receipt: it does not decide whether a slot may be restored.
"""

from __future__ import annotations

import dataclasses
import enum
import struct

import xxhash

from ..errors import CorruptSlot
from ..state.layout import PAGE_NBYTES, Extents

MAGIC = b"MLFLASH\x00"
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
    found = any_record(page, start)
    return None if found is None or found[0] != attempt else found[1]


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
