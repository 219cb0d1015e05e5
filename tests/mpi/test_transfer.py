"""A slot from one rank to another: it arrives whole, or it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulated import on_node

from mlflash.memory.node_directory import NodeDirectory
from mlflash.memory.shared_memory_segment import create
from mlflash.memory.slot import Slot, read_header
from mlflash.memory.slot_header import Attempt, Header
from mlflash.mpi.fabric import OpenMemory, Poke
from mlflash.mpi.world import World
from mlflash.placement.node import this_node
from mlflash.redundancy.slot_transfer import Source, receive, send, slot_of
from mlflash.state.layout import Extents

pytestmark = pytest.mark.mpi(min_size=2)
EXTENTS = Extents(manifest_room=4096, payload_nbytes=1_000_000, block_nbytes=65_536)
ATTEMPT = Attempt(b"r" * 16, 3)


class Damaged(Source):
    """A source whose bytes change after their checksum was made, as a bad DIMM or wire would have it."""

    done = False

    def check_up_to(self, block: int) -> None:
        super().check_up_to(block)
        if not self.done and block * self.extents.block_nbytes > 600_000:
            self.slot.body(self.extents)[600_000] ^= 1
            self.done = True


class Ring:
    """Every rank sends a slot to the next one."""

    def __init__(self, comm: Any, root: Path, transport: str):
        memory = on_node(root)["memory"]
        self.world = World(comm, this_node(memory), 30.0).connect()
        self.world.start_job(lambda error: None)
        self.memory = NodeDirectory(memory, "t")
        self.out, self.inbox = (Slot(create(self.memory, EXTENTS.nbytes)) for _ in range(2))
        for slot in (self.out, self.inbox):
            slot.segment.prefault()
        self.out.body(EXTENTS)[:] = np.random.default_rng(comm.rank).integers(
            0, 256, EXTENTS.body_nbytes, dtype=np.uint8
        )
        self.to, self.come = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        self.window: OpenMemory | None = None
        if transport == "rma":
            self.world.poke = Poke(self.world)
            self.window = OpenMemory(self.world, self.world.world, self.inbox.view)

    def header(self, check: int) -> Header:
        return Header(ATTEMPT, 7, self.world.rank, self.world.size, 0, 0, 100, EXTENTS, check, 0, "n", "copy", "t", ())

    def exchange(self, source: Source, owner: int, attempt: Attempt = ATTEMPT) -> list[bool]:
        """Returns what the sender was told, and what the receiver found."""
        window = self.window
        target = None if window is None else lambda number: (window, self.to)
        exposed = None if window is None else (0, window)
        return self.world.drive([
            send(self.world, self.to, source, target),
            receive(self.world, self.come, self.inbox, EXTENTS, slot_of(owner, attempt), exposed),
        ])  # fmt: skip

    def free(self) -> None:
        if self.window is not None:
            self.window.free()
        self.world.free()
        self.memory.close()


@pytest.fixture
def ring(comm: Any, root: Path, options: dict[str, Any]) -> Any:
    ring = Ring(comm, root, options["transport"])
    yield ring
    ring.free()


def test_a_slot_arrives_bit_for_bit_and_both_are_sealed(ring: Ring) -> None:
    assert ring.exchange(Source(ring.out, EXTENTS, ring.header), ring.come) == [True, True]
    expected = np.random.default_rng(ring.come).integers(0, 256, EXTENTS.body_nbytes, dtype=np.uint8)
    assert np.array_equal(ring.inbox.body(EXTENTS), expected)
    assert read_header(ring.inbox.view) == ring.inbox.header and ring.inbox.header.rank == ring.come
    ring.inbox.verify()
    ring.out.verify()
    # And once more, of the sealed slot.
    assert ring.exchange(Source(ring.out, EXTENTS, None), ring.come) == [True, True]
    ring.inbox.verify()


def test_a_byte_that_changes_on_the_way_is_found_and_the_copy_is_not_sealed(
    ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "mlflash.redundancy.slot_transfer.ARRIVAL_S", 1.0
    )  # seconds that a Put byte may take to become visible
    assert ring.exchange(Damaged(ring.out, EXTENTS, ring.header), ring.come) == [False, False]
    assert ring.inbox.header is None and read_header(ring.inbox.view) is None


@pytest.mark.parametrize(("owner", "attempt"), [(1, ATTEMPT), (0, Attempt(b"x" * 16, 3)), (0, Attempt(b"r" * 16, 4))])
def test_a_slot_of_another_rank_or_attempt_is_refused(ring: Ring, owner: int, attempt: Attempt) -> None:
    assert ring.exchange(Source(ring.out, EXTENTS, ring.header), ring.come + owner, attempt) == [False, False]
    assert read_header(ring.inbox.view) is None
