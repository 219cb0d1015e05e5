"""What is verified at rest: how fast, what of it, and what is said, on a simulated clock and real slots."""

from __future__ import annotations

import dataclasses
import types
from pathlib import Path
from typing import Any

import holds
import numpy as np
import pytest
from damage import flip, headers
from waiting import until

from mlflash import Checkpointer
from mlflash.memory.node_directory import NodeDirectory
from mlflash.memory.shared_memory_segment import create
from mlflash.memory.slot import Attempt, Header, Slot, Use, table_check
from mlflash.memory.slot_pool import SlotPool
from mlflash.restore.scrub import Scrubber
from mlflash.state.layout import Extents

BLOCK = 1 << 16
RATE = 50e6
NEVER = lambda: False  # noqa: E731


@dataclasses.dataclass
class Rank:
    """A rank that holds things, what it says of them, and its clock."""

    pool: SlotPool
    memory: NodeDirectory
    damaged: bool = False
    now: float = 100.0

    def __post_init__(self) -> None:
        self.said: list[tuple[Any, ...]] = []
        self.texts: list[str] = []
        self.recorder = types.SimpleNamespace(damaged=self._say)
        self.world = types.SimpleNamespace(rank=1, node_name="n1")
        self.drain: Any = None

    def _say(self, file: str, kind: str, step: int, of: int, block: int | None, text: str) -> None:
        self.said.append((file, kind, step, of, block))
        self.texts.append(text)

    def clock(self) -> float:
        return self.now

    def hold(self, slot: Slot, blocks: int, generation: int = 1, **header: Any) -> Slot:
        """Fill a slot, and hold it."""
        extents = Extents(4096, blocks * BLOCK - 4096 - 100, BLOCK)
        slot.segment = slot.segment or create(self.memory, extents.nbytes)
        slot.segment.prefault()
        slot.unseal()
        slot.body(extents)[:] = np.random.default_rng(generation).integers(0, 256, extents.body_nbytes, dtype=np.uint8)
        slot.table(extents)[:] = slot.check_blocks(extents, 0, extents.blocks)
        fields: dict[str, Any] = {"rank": 1, "group": (1,)} | header
        slot.seal(Header(Attempt(bytes(16), generation), 10 * generation, fields.pop("rank"), 4, 1, 0, 0, extents,
                         table_check(slot.table(extents)), 0, "n1", "copy", "j", **fields))  # fmt: skip
        slot.use = Use.HOLDS
        return slot

    def scrubber(self, rate: float = RATE) -> Scrubber:
        return Scrubber(self, rate, lambda: self.drain, self.clock)  # type: ignore[arg-type]

    def pass_time(self, scrubber: Scrubber, seconds: float, tick_s: float = 0.05) -> None:
        for _ in range(round(seconds / tick_s)):
            self.now += tick_s
            scrubber.go_on(NEVER)


@pytest.fixture
def rank(node_memory: NodeDirectory) -> Rank:
    return Rank(SlotPool(node_memory, [0, 1]), node_memory)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The bytes of blocks that are read, with the file that they are of."""
    runs: list[tuple[str, int]] = []
    real = Slot.check_blocks

    def check(slot: Slot, extents: Extents, first: int, last: int) -> np.ndarray:
        runs.append((slot.name, (last - first) * extents.block_nbytes))
        return real(slot, extents, first, last)

    monkeypatch.setattr(Slot, "check_blocks", check)
    return runs


def kinds(rank: Rank) -> dict[str, Slot]:
    """A slot of each kind, held."""
    return {
        "own": rank.hold(rank.pool.own[0], 40),
        "share": rank.hold(rank.pool.shares[1], 40, share=0, shared_by=1),
        "copy": rank.hold(rank.pool.inbox[0][1], 40, rank=0, group=(0, 1)),
        "parity": rank.hold(rank.pool.inbox[1][0], 40, parities=1, group=(0, 1, 2)),
    }


@pytest.mark.parametrize("rate", [1e6, RATE])
def test_bytes_are_read_at_the_rate_and_pauses_are_not_made_up_for(
    rank: Rank, read: list[tuple[str, int]], rate: float
) -> None:
    rank.hold(rank.pool.own[0], 1600)
    scrubber = rank.scrubber(rate)
    read.clear()
    seconds = min(20.0, 60e6 / rate)  # less than what there is
    rank.pass_time(scrubber, seconds, min(0.05, seconds / 20))
    assert sum(nbytes for _, nbytes in read) == pytest.approx(rate * seconds, rel=0.05, abs=0.5 * rate + (2 << 20))
    rank.now += 1000  # a job
    read.clear()
    scrubber.go_on(NEVER)
    assert sum(nbytes for _, nbytes in read) <= 0.6 * rate + (1 << 20)


@pytest.mark.parametrize("place", ["header", "table", "first block", "last block"])
@pytest.mark.parametrize("kind", ["own", "share", "copy", "parity"])
def test_damage_of_each_kind_of_file_is_found_and_said_once(rank: Rank, kind: str, place: str) -> None:
    slots = kinds(rank)
    scrubber = rank.scrubber()
    rank.pass_time(scrubber, 3)
    assert rank.said == [] and not rank.damaged
    slot = slots[kind]
    assert slot.header is not None
    extents = slot.header.extents
    at = {"header": 200, "table": extents.table_start, "first block": 4096,
          "last block": 4096 + extents.body_nbytes - 1}[place]  # fmt: skip
    slot.view[at] ^= 4
    rank.pass_time(scrubber, 10)
    block = {"first block": 0, "last block": 39}.get(place)
    of = 0 if kind == "copy" else 1
    assert rank.said == [(slot.name, kind, 10, of, block)]
    assert rank.damaged == (kind != "share")  # of a share nothing is made again before the next save
    (text,) = rank.texts
    assert text.startswith(f"{slot.name} on n1 is damaged: ") and f"of rank {of} at step 10" in text
    assert scrubber.damaged == [slot]
    slot.view[at] ^= 4  # repaired
    scrubber.forget([slot])
    rank.pass_time(scrubber, 3)
    assert len(rank.said) == 1 and scrubber.damaged == []
    slot.view[at] ^= 4  # and damaged again
    rank.pass_time(scrubber, 3)
    assert len(rank.said) == 2


@pytest.mark.parametrize("use", [Use.FREE, Use.BUSY])
def test_what_may_be_written_is_never_read(rank: Rank, read: list[tuple[str, int]], use: Use) -> None:
    held, other = rank.hold(rank.pool.own[0], 4), rank.hold(rank.pool.own[1], 4)
    other.use = use
    other.view[5000] ^= 1
    read.clear()
    rank.pass_time(rank.scrubber(), 5)
    assert {name for name, _ in read} == {held.name} and rank.said == []


def test_a_slot_that_is_taken_between_two_runs_is_read_no_further(rank: Rank, read: list[tuple[str, int]]) -> None:
    slot = rank.hold(rank.pool.own[0], 400)
    scrubber = rank.scrubber(10e6)
    rank.pass_time(scrubber, 0.5)
    assert read
    slot.unseal()
    slot.view[:] = 7
    read.clear()
    rank.pass_time(scrubber, 5)
    assert read == [] and rank.said == []
    rank.hold(slot, 400, generation=2)  # it begins anew with what is there then
    rank.pass_time(scrubber, 5)
    assert rank.said == []
    slot.view[4096] ^= 1
    rank.pass_time(scrubber, 5)
    assert rank.said == [(slot.name, "own", 20, 1, 0)]


@pytest.mark.usefixtures("held_couriers")
@pytest.mark.parametrize(("how", "form"), [("flipped", "hdf5"), ("truncated", "dcp"), ("gone", "hdf5")])
def test_a_drained_file_is_read_once_when_memory_is_verified_and_its_damage_is_said(
    shm: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str, form: str
) -> None:
    options = {"job": "j", "memory": str(shm), "redundancy": "none", "drain_every": 1, "format": form}
    with Checkpointer(tmp_path / "d", **options) as ckpt:
        ended = holds.hold("drain.ended")
        ckpt.save(3, {"w": np.arange(300_000.0), "step": 3}).wait()
        until(lambda: ended.is_reached, "the drain, whose file is not read yet")
        (file,) = [*(tmp_path / "d").glob("step-*/rank-*.h5"), *(tmp_path / "d").glob("step-*/__0_0.distcp")]
        raw = bytearray(file.read_bytes())
        raw[raw.find(np.arange(1000.0, 1008.0).tobytes())] ^= 1
        if how == "gone":
            file.unlink()
        else:
            file.write_bytes(raw if how == "flipped" else raw[:-1])
        ended.set()
        damaged = lambda: ckpt.report()["counts"].get("files damaged", 0)
        until(damaged, "the damage to be found")
        flip(*next((path, header.extents.payload_start) for path, header in headers(shm)))
        until(lambda: damaged() > 1, "another look at memory, after more at what is drained")
        assert damaged() == 2
        ckpt.save(4, {"w": np.arange(300_000.0), "step": 4}).wait()  # it goes on
        ckpt.wait_drained()
    (text,) = [text for text in caplog.messages if "is damaged" in text and "slot-" not in text]
    assert str(file) in text and "rank 0 at step 3" in text
