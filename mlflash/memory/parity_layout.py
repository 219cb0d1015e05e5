"""Which blocks are coded together, and who holds the parity: RAID's rotated parity over the ranks of a group.

The bodies of a group's slots are cut into blocks, those of a checksum. A *row* is `data` consecutive blocks of each
of the `members`; it has `members` *stripes*, each of one block of `data` different members, its data units, and of
`losses` parity blocks, which the other members hold. So every member holds as much parity as any other, and a lost
member takes at most one unit of each stripe with it.

Example:
    4 members, 1 loss (xor:4), one row; member 0's blocks are a0 a1 a2, and so on; stripe s has its parity on
    member s:

        stripe 0: b0 c1 d2 | parity on a      stripe 2: d0 a1 b2 | parity on c
        stripe 1: c0 d1 a2 | parity on b      stripe 3: a0 b1 c2 | parity on d

Source: RAID-5 and RAID-6 with rotated parity; SCR's XOR scheme (Moody et al., SC 2010) spreads it in the same way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from ..errors import CorruptSlot
from ..state.layout import CHECK_NBYTES, Extents, round_up
from .slot import HEADER_NBYTES, Header, Slot, table_check, unpack


@dataclasses.dataclass(frozen=True)
class Unit:
    """A block of a member of a group: of its slot (``parity`` false), or of its parity."""

    member: int
    parity: bool
    block: int
    group: int = 0


@dataclasses.dataclass(frozen=True)
class Task:
    """Blocks that are computed from other blocks of their stripe, by the rank that holds one of them."""

    coder: Unit  # the block whose holder does it
    inputs: tuple[Unit | None, ...]  # units `have` of the stripe; None is a block of zeros
    outputs: tuple[Unit, ...]  # units `want` of the stripe
    # have, want: numbers of the units, as `erasure_codes.matrix` takes them
    have: tuple[int, ...]
    want: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Stripes:
    """The stripes of a group."""

    blocks: tuple[int, ...]  # number of blocks in the slot of each member
    losses: int
    number: int = 0  # number of the group, if there are several

    @property
    def members(self) -> int:
        return len(self.blocks)

    @property
    def data(self) -> int:
        return self.members - self.losses

    @property
    def rows(self) -> int:
        return -(-max(self.blocks) // self.data)

    @property
    def parity_blocks(self) -> int:
        return self.rows * self.losses

    def unit(self, member: int, parity: bool, block: int) -> Unit:
        return Unit(member, parity, block, self.number)

    def units(self, row: int, stripe: int) -> list[Unit | None]:
        """The units of a stripe, data first; None if a slot has no such block: it counts as zeros."""
        units: list[Unit | None] = []
        for column in range(self.data):
            member = (stripe + self.losses + column) % self.members
            block = row * self.data + column
            units.append(self.unit(member, False, block) if block < self.blocks[member] else None)
        for nth in range(self.losses):
            units.append(self.unit((stripe + nth) % self.members, True, row * self.losses + nth))
        return units

    def stripe_of(self, unit: Unit) -> tuple[int, int]:
        per_row = self.losses if unit.parity else self.data
        row, column = divmod(unit.block, per_row)
        return row, (unit.member - column - (0 if unit.parity else self.losses)) % self.members

    def encode(self, holders: Collection[int]) -> Iterator[Task]:
        """Plan how the parity of some members is made, in the order in which all members work.

        A stripe's parity is made by the first of its holders and sent to the others, so that each data block travels
        once, whatever the number of parity blocks.
        """
        for row in range(self.rows):
            for stripe in range(self.members):
                units = self.units(row, stripe)
                held = [nth for nth in range(self.losses) if (stripe + nth) % self.members in holders]
                want = tuple(self.data + nth for nth in held)
                outputs = tuple(unit for u in want if (unit := units[u]) is not None)
                if outputs:
                    yield Task(outputs[0], tuple(units[: self.data]), outputs, tuple(range(self.data)), want)

    def rebuild(self, lost: Collection[Unit]) -> list[Task] | None:
        """Plan how the data blocks among the lost ones are rebuilt; None if too many are lost for that.

        The ranks that hold blocks of the stripes decode them in turn, and not the rank that needs the result, so that
        no member receives more than the others.
        """
        stripes = sorted({self.stripe_of(unit) for unit in lost if not unit.parity})
        tasks = []
        for row, stripe in stripes:
            units = self.units(row, stripe)
            missing = [nth for nth, unit in enumerate(units) if unit is not None and unit in lost]
            if len(missing) > self.losses:
                return None
            good = [nth for nth in range(self.members) if nth not in missing]
            # Units that are all zeros come first, because they cost nothing.
            have = tuple(sorted(good, key=lambda nth: units[nth] is not None)[: self.data])
            inputs = tuple(units[nth] for nth in have)
            coders = [unit for unit in inputs if unit is not None]
            want = tuple(nth for nth in missing if nth < self.data)
            outputs = tuple(unit for nth in want if (unit := units[nth]) is not None)
            tasks.append(Task(coders[(row + stripe) % len(coders)], inputs, outputs, have, want))
        return tasks


def parity_extents(blocks: Sequence[int], losses: int, block_nbytes: int) -> Extents:
    """The parts of a parity file of a group whose slots have so many blocks: their heads, then parity blocks."""
    heads_nbytes = sum(HEADER_NBYTES + count * CHECK_NBYTES for count in blocks)
    parity_blocks = Stripes(tuple(blocks), losses).parity_blocks
    return Extents(round_up(heads_nbytes, block_nbytes), parity_blocks * block_nbytes, block_nbytes)


def recoverable(members: int, losses: int, no_slot: Collection[int], no_parity: Collection[int]) -> bool:
    """Whether the missing slots can be rebuilt, judged by whole files."""
    row = Stripes((members - losses,) * members, losses)  # as many blocks as fill one row
    lost = {row.unit(member, False, block) for member in no_slot for block in range(row.data)}
    lost |= {row.unit(member, True, block) for member in no_parity for block in range(losses)}
    return row.rebuild(lost) is not None


# Heads: the header and the block table of each slot of the group, where a slot has its manifest


Head = tuple[Header, np.ndarray]
"""The header of a slot, and its block table: ``(blocks,)`` uint64."""


def heads_blocks(extents: Extents) -> int:
    """How many blocks of a parity file the heads take: its first parity block is the next one."""
    return extents.manifest_room // extents.block_nbytes


def pack_heads(heads: Sequence[Head]) -> bytes:
    """Encode the heads of a group, in the order of its ranks."""
    return b"".join(header.pack() + table.tobytes() for header, table in heads)


def read_heads(slot: Slot) -> list[Head]:
    """Decode and check the heads in a sealed parity file, by rank of its group. Raises CorruptSlot if they differ."""
    assert slot.header is not None
    raw = slot.body(slot.header.extents)[: slot.header.manifest_nbytes].tobytes()
    return decode_heads(raw, slot.header, slot.name)


def decode_heads(raw: bytes, of: Header, name: str) -> list[Head]:
    """Decode the heads of a group from a parity file's bytes. Raises CorruptSlot if its header does not match."""
    heads = []
    at = 0
    for rank in of.group:
        header = unpack(raw[at : at + HEADER_NBYTES])
        at += HEADER_NBYTES
        end = at + header.extents.blocks * CHECK_NBYTES
        if end > len(raw) or (header.rank, header.attempt) != (rank, of.attempt):
            raise CorruptSlot(f"the heads in {name} are not those of its group", rank=of.rank)
        table = np.frombuffer(raw[at:end], dtype="<u8")
        if table_check(table) != header.table_check:
            raise CorruptSlot(f"a block table in {name} is not what its header says", rank=of.rank)
        heads.append((header, table))
        at = end
    if at != len(raw):
        raise CorruptSlot(f"the heads in {name} are longer than they say", rank=of.rank)
    return heads
