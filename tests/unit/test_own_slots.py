"""A rank's own slots, between its trainer and its courier: each has one owner at any time, whatever comes."""

from __future__ import annotations

import itertools
import os
import tempfile
import threading
import types
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from interruption import interrupted
from waiting import PATIENCE_S

from mlflash.memory import shared_memory_segment
from mlflash.memory.node_directory import NodeDirectory
from mlflash.memory.own_slots import OwnSlots, SlotFile, SlotId
from mlflash.memory.slot import Slot, Use
from mlflash.memory.slot_header import Attempt
from mlflash.memory.slot_pool import SlotPool, unmap
from mlflash.state.layout import PAGE_NBYTES


class Device:
    """Copies into a segment until it is told that it is done."""

    def __init__(self) -> None:
        self.is_done = False


class Save:
    """What slots are taken for, and whether the courier was told of it."""

    def __init__(self, pair: Sequence[Slot]):
        self.pair, self.is_sent = list(pair), False
        self.got: list[Slot] = []


class Both:
    """The two ends, which talk without anything between them."""

    def __init__(self, memory: NodeDirectory, count: int):
        self.memory = memory
        self.pool = SlotPool(memory, [], slots=count)
        self.own = OwnSlots(memory, count)
        self.pool.trainer = self.own
        self.saves: list[Save] = []
        self.devices: list[Device] = []
        self.generation = 0

    def pairs(self) -> list[tuple[SlotId, Slot, Slot]]:
        """The trainer's and the courier's side of each slot."""
        sides = ((False, self.own.own, self.pool.own), (True, self.own.shares, self.pool.shares))
        return [(SlotId(kind, number), *both) for kind, mine, theirs in sides
                for number, both in enumerate(zip(mine, theirs, strict=True))]  # fmt: skip

    def news(self, only: Sequence[Slot] | None = None) -> list[SlotFile]:
        news = self.pool.news(only)
        self.own.update(news)
        return news

    def take(self, leave: bool = False) -> Save | None:
        save = Save(())
        pair = self.own.take(0, save, leave)
        if pair is None:
            return None
        save.pair = list(pair)
        assert not any(slot.is_lent for slot in pair), "somebody has views of what is filled"
        self.saves.append(save)
        return save

    def give_back(self, save: Save) -> None:
        self.own.give_back(self.own.taken_by(save))
        self.saves.remove(save)

    def send(self, save: Save) -> None:
        inodes = [0 if slot.segment is None else slot.segment.inode for slot in save.pair]
        save.got = self.pool.receive(list(zip(self.own.ids_of(save.pair), inodes, strict=True)), save)
        save.is_sent = True

    def finish(self, save: Save, committed: bool) -> None:
        self.generation += 1
        attempt = Attempt(b"r" * 16, self.generation)
        if committed:
            self.own.committed(save)
            for slot in save.got:
                header: Any = types.SimpleNamespace(attempt=attempt)
                slot.header = header
        self.pool.release(attempt, save.got, committed)
        self.saves.remove(save)

    def grow(self, slots: Sequence[Slot], nbytes: int, waiting: Sequence[Slot] = ()) -> list[Slot]:
        """Replace files as `context.make_room` does; gives what was borrowed."""
        with self.pool.reserved([(slot, nbytes) for slot in slots], waiting) as (taken, borrowed):
            self.check()
            for slot in slots:
                is_ours = any(slot is one for one in (*taken, *waiting))
                if is_ours and not slot.drains and slot.view.nbytes < nbytes and not slot.is_lent:
                    old, slot.segment = slot.segment, None
                    unmap(slot)
                    slot.segment = shared_memory_segment.create(self.memory, nbytes) if old is None else \
                        shared_memory_segment.grow(self.memory, old, nbytes)  # fmt: skip
            self.check()
        return borrowed

    def check(self) -> None:
        """Whoever may write a slot is the only one who may."""
        for name, mine, theirs in self.pairs():
            is_left = theirs.use is Use.BUSY and theirs.taker is not None and not isinstance(theirs.taker, Save)
            is_filled = mine.use is Use.BUSY and isinstance(mine.taker, Save) and not mine.taker.is_sent
            assert (mine.use is Use.FREE or is_filled) <= is_left, f"{name} has two owners"
            assert is_left <= (mine.use is not Use.HOLDS), f"{name} has none"
            assert not (is_left and theirs.drains), f"{name} is read, and may be filled"
            if isinstance(theirs.taker, Save) and theirs.use is Use.BUSY:
                assert mine.taker is theirs.taker, f"{name} is busy with two saves"
            if mine.use is Use.FREE and mine.segment is not None and theirs.segment is not None:
                assert mine.segment.inode == theirs.segment.inode, f"{name} has two files"
                assert mine.segment.nbytes == theirs.segment.nbytes, f"{name} is mapped in part"

    def close(self) -> None:
        for device in self.devices:
            device.is_done = True
        assert not self.own.is_device_stuck
        self.own.close()
        self.pool.close()


@pytest.fixture
def both(node_memory: NodeDirectory) -> Iterator[Both]:
    made = Both(node_memory, 2)
    made.news()
    yield made
    made.close()


class Walk(RuleBasedStateMachine):
    """Anything that trainer and courier may do, in any order."""

    @initialize(count=st.sampled_from([2, 3]))
    def begin(self, count: int) -> None:
        self.folder = tempfile.TemporaryDirectory(dir="/dev/shm")
        self.memory = NodeDirectory(self.folder.name, "j")
        self.both = Both(self.memory, count)
        self.newest: Slot | None = None
        self.lent: list[tuple[Slot, bytes]] = []
        self.both.news()

    def saves(self, is_sent: bool) -> list[Save]:
        return [save for save in self.both.saves if save.is_sent == is_sent]

    @rule(leave=st.booleans(), byte=st.integers(1, 255), hears=st.booleans(),
          how_far=st.sampled_from(["filled", "sent", "ended", "ended"]))  # fmt: skip
    def save(self, leave: bool, byte: int, hears: bool, how_far: str) -> None:
        """Begin a save, and bring it to an end, or leave the rest to other rules."""
        if hears:
            self.both.news()
        save = self.both.take(leave)
        if save is None:
            return
        for slot in save.pair:
            slot.view[:] = byte
        if how_far != "filled" and self.saves(is_sent=False) == [save]:
            self.both.send(save)
        if how_far == "ended" and self.saves(is_sent=True) == [save]:
            self.end_save(committed=True)

    @precondition(lambda self: self.saves(is_sent=False))
    @rule(nth=st.integers(0, 3), is_given_up=st.sampled_from([False, False, False, True]), has_device=st.booleans())
    def hand_over(self, nth: int, is_given_up: bool, has_device: bool) -> None:
        """The courier gets what was filled, or the save is given up; a device may still write into it."""
        filling = self.saves(is_sent=False)
        if not is_given_up:
            self.both.send(filling[0])
            return
        save = filling[nth % len(filling)]
        for slot in save.pair if has_device else ():
            if slot.segment is not None:
                self.both.devices.append(Device())
                slot.segment.writers.append(self.both.devices[-1])
        stuck = [slot.segment for slot in save.pair if slot.segment is not None and has_device]
        self.both.give_back(save)
        for slot in save.pair:
            assert slot.segment not in stuck, "somebody gets what a device still writes"
        assert not {segment.name for segment in stuck} & {*self.memory.slot_names()}

    @precondition(lambda self: self.saves(is_sent=True))
    @rule(committed=st.sampled_from([True, True, False]))
    def end_save(self, committed: bool) -> None:
        save = self.saves(is_sent=True)[0]
        self.both.finish(save, committed)
        self.newest = save.got[0] if committed else self.newest
        self.both.news()

    @precondition(lambda self: not self.saves(is_sent=False))
    @rule()
    def crash(self) -> None:
        """The courier ends. The next one gets all slots, and takes those for free that hold nothing."""
        assert self.both.own.wait_until_given(1.0, lambda taker: True)
        assert {slot.use for slot in (*self.both.own.own, *self.both.own.shares)} == {Use.HOLDS}
        for save in self.saves(is_sent=True):
            self.both.finish(save, committed=False)
        for _, _, theirs in self.both.pairs():
            if theirs.use is Use.BUSY:
                theirs.use, theirs.taker = Use.FREE, None

    @rule(some=st.none() | st.sets(st.integers(0, 5), max_size=2))
    def news(self, some: set[int] | None) -> None:
        slots = self.both.pool.all()
        self.both.news(None if some is None else [slots[number % len(slots)] for number in some])

    @rule(some=st.sets(st.integers(0, 3), min_size=1, max_size=2), pages=st.integers(1, 5))
    def grow(self, some: set[int], pages: int) -> None:
        slots = self.both.pool.all()
        self.both.grow([slots[number] for number in sorted(some)], PAGE_NBYTES * pages)

    @precondition(lambda self: self.saves(is_sent=True))
    @rule(pages=st.integers(1, 5))
    def grow_what_a_save_waits_for(self, pages: int) -> None:
        save = self.saves(is_sent=True)[-1]
        self.both.grow(save.got, PAGE_NBYTES * pages, save.got)

    @rule(ends=st.sampled_from([False, False, True]))
    def drain(self, ends: bool) -> None:
        if ends:
            self.both.pool.drained([slot for slot in self.both.pool.own if slot.drains])
        for slot in self.both.pool.own if not ends else ():
            slot.drains = slot.drains or slot.use is Use.HOLDS

    @precondition(lambda self: not self.lent)
    @rule()
    def lend(self) -> None:
        for name, mine, theirs in self.both.pairs():
            if theirs.use is Use.HOLDS and mine.segment is not None and not name.is_share:
                slot = self.both.own.lend(self.both.own.holding(name.number))
                self.lent.append((slot, slot.view.tobytes()))

    @precondition(lambda self: self.lent)
    @rule(nth=st.integers(0, 9))
    def give_back_what_was_lent(self, nth: int) -> None:
        self.lent.pop(nth % len(self.lent))

    @rule()
    def devices_end(self) -> None:
        for device in self.both.devices:
            device.is_done = True

    @invariant()
    def every_slot_has_one_owner(self) -> None:
        self.both.check()
        assert self.newest is None or self.newest.use is Use.HOLDS, "the newest checkpoint may be written over"
        for slot, content in self.lent:
            assert slot.view.tobytes() == content

    def teardown(self) -> None:
        self.lent.clear()
        self.both.close()
        self.memory.close()
        self.folder.cleanup()


TestWalk = Walk.TestCase
TestWalk.settings = settings(max_examples=100, stateful_step_count=60, suppress_health_check=list(HealthCheck))


def test_a_larger_file_may_have_the_number_on_disk_that_the_smaller_one_had(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fstat

    def fstat(fd: int) -> Any:
        """As on file systems that give a number again as soon as nobody has the file."""
        found = real(fd)
        names = [name for name in dir(found) if name.startswith("st_")]
        return types.SimpleNamespace(**{**{name: getattr(found, name) for name in names}, "st_ino": 7})

    with monkeypatch.context() as patched:
        patched.setattr(os, "fstat", fstat)
        for pages in (1, 2):
            both.grow(both.pool.own[:1], pages * PAGE_NBYTES)
            both.news()
            assert both.own.own[0].view.nbytes == pages * PAGE_NBYTES


def test_an_exception_anywhere_in_the_wait_for_a_slot_leaves_nothing_locked(both: Both) -> None:
    """As of a signal's handler, which may come between any two lines, and where a function is entered or left."""
    for number in itertools.count(1):
        was_left = interrupted(lambda: both.own.take(0.001, object()), number)
        other = threading.Thread(target=both.own.give_back, args=([],), daemon=True)
        other.start()
        other.join(PATIENCE_S)
        assert not other.is_alive(), f"after {number} events a lock is held by nobody"
        if not was_left:
            break
    assert number > 21
