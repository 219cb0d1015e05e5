"""Leases of a rank's own slots: what a trainer fills, its courier gives to nobody else, whatever comes."""

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
from mlflash.memory.slot import Attempt, Slot, Use
from mlflash.memory.slot_pool import SlotPool, unmap
from mlflash.state.layout import PAGE_NBYTES


class Device:
    """Copies into a segment until it is told that it is done."""

    def __init__(self) -> None:
        self.is_done = False


class Save:
    """What slots are leased for, and whether the courier was told of it."""

    def __init__(self) -> None:
        self.pair: list[Slot] = []
        self.segments: list[Any] = []  # that are filled
        self.is_sent, self.number = False, 0


class Courier:
    """The courier's answers, without anything between."""

    def __init__(self, pool: SlotPool):
        self.lease, self.release = pool.lease, pool.end_lease


class Both:
    """The two ends."""

    def __init__(self, memory: NodeDirectory, count: int):
        self.memory = memory
        self.pool = SlotPool(memory, [], own=count)
        self.own = OwnSlots(memory, count, Courier(self.pool))
        self.saves: list[Save] = []
        self.devices: list[Device] = []
        self.generation = 0

    def pairs(self) -> list[tuple[SlotId, Slot, Slot]]:
        """The trainer's and the courier's side of each slot."""
        sides = ((False, self.own.own, self.pool.own), (True, self.own.shares, self.pool.shares))
        return [(SlotId(kind, number), *both) for kind, own, slot in sides
                for number, both in enumerate(zip(own, slot, strict=True))]  # fmt: skip

    def take(self, leave: bool = False) -> Save | None:
        save = Save()
        pair = self.own.take(0, save, leave)
        if pair is None:
            return None
        save.pair, save.number, save.segments = list(pair), pair[0].lease, [slot.segment for slot in pair]
        assert not any(slot.is_lent for slot in pair), "somebody has views of what is filled"
        self.saves.append(save)
        return save

    def leased(self, save: Save) -> list[Slot]:
        return self.pool.leased(save.number)

    def give_back(self, save: Save) -> None:
        self.own.give_back(save)
        self.saves.remove(save)

    def finish(self, save: Save, committed: bool) -> Slot:
        self.generation += 1
        attempt, leased = Attempt(b"r" * 16, self.generation), self.leased(save)
        for slot in leased if committed else ():
            header: Any = types.SimpleNamespace(attempt=attempt)
            slot.header = header
        self.pool.release(attempt, leased, committed)
        self.own.ended(save)
        self.saves.remove(save)
        return leased[0]

    def grow(self, slots: Sequence[Slot], nbytes: int, waiting: Sequence[Slot] = ()) -> None:
        """Replace files as `context.make_room` does."""
        with self.pool.reserved([(slot, nbytes) for slot in slots]) as taken:
            self.check()
            for slot in slots:
                is_ours = any(slot is other for other in (*taken, *waiting))
                if is_ours and not slot.drains and slot.view.nbytes < nbytes and not slot.is_lent:
                    old, slot.segment = slot.segment, None
                    unmap(slot)
                    slot.segment = shared_memory_segment.create(self.memory, nbytes) if old is None else \
                        shared_memory_segment.grow(self.memory, old, nbytes)  # fmt: skip
            self.check()

    def check(self) -> None:
        """What a save fills is leased to it and to nobody else, and it fills the file that the courier has."""
        for name, own, slot in self.pairs():
            save = self.own._leases.get(own.lease)
            if isinstance(save, Save) and not save.is_sent:
                assert slot.use is Use.BUSY and slot.lease == own.lease == save.number, f"{name} is not leased"
                assert not slot.drains, f"{name} is read, and may be filled"
                assert (own.inode, own.view.nbytes) == (slot.inode, slot.view.nbytes), f"{name} has two files"
                assert any(own.segment is other for other in save.segments), f"{name} is unmapped while it is filled"
            assert (slot.lease > 0) <= (slot.use is Use.BUSY), f"{name} is leased, and free"
        numbers = [slot.lease for _, _, slot in self.pairs() if slot.lease]
        assert all(numbers.count(number) == 2 for number in numbers), "a lease is of a pair"

    def close(self) -> None:
        for device in self.devices:
            device.is_done = True
        assert not self.own.is_device_stuck
        self.own.close()
        self.pool.close()


@pytest.fixture
def both(node_memory: NodeDirectory) -> Iterator[Both]:
    made = Both(node_memory, 2)
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
        self.reports: list[list[SlotFile]] = []  # reports that are on their way

    def saves(self, is_sent: bool) -> list[Save]:
        return [save for save in self.both.saves if save.is_sent == is_sent]

    @rule(leave=st.booleans(), byte=st.integers(1, 255), how_far=st.sampled_from(["filled", "sent", "ended", "ended"]))
    def save(self, leave: bool, byte: int, how_far: str) -> None:
        """Begin a save, and bring it to an end, or leave the rest to other rules."""
        save = self.both.take(leave)
        if save is None:
            return
        for slot in save.pair:
            slot.view[:] = byte
        if how_far != "filled" and self.saves(is_sent=False) == [save]:
            save.is_sent = True
        if how_far == "ended" and self.saves(is_sent=True) == [save]:
            self.end_save(committed=True)

    @precondition(lambda self: self.saves(is_sent=False))
    @rule(nth=st.integers(0, 3), is_given_up=st.sampled_from([False, False, False, True]), has_device=st.booleans())
    def hand_over(self, nth: int, is_given_up: bool, has_device: bool) -> None:
        """The courier gets what was filled, or the save is given up; a device may still write into it."""
        filling = self.saves(is_sent=False)
        if not is_given_up:
            filling[0].is_sent = True
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
        slot = self.both.finish(self.saves(is_sent=True)[0], committed)
        self.newest = slot if committed else self.newest

    @precondition(lambda self: not self.saves(is_sent=False))
    @rule()
    def crash(self) -> None:
        """The courier ends. The next one gets all slots, and takes those for free that hold nothing."""
        assert self.both.own.wait_until_ended(1.0, lambda taker: True)
        assert {slot.use for slot in (*self.both.own.own, *self.both.own.shares)} == {Use.HOLDS}
        self.both.saves.clear()
        self.reports.clear()
        for _, _, slot in self.both.pairs():
            if slot.use is Use.BUSY:
                slot.use, slot.lease = Use.FREE, 0

    @rule(arrives=st.booleans())
    def news(self, arrives: bool) -> None:
        """Files are reported, and reports arrive in order, but perhaps after the answer to a later lease."""
        self.reports.append(self.both.pool.news())
        while arrives and self.reports:
            self.both.own.update(self.reports.pop(0))

    @rule(some=st.sets(st.integers(0, 3), min_size=1, max_size=2), pages=st.integers(1, 5))
    def grow(self, some: set[int], pages: int) -> None:
        slots = self.both.pool.all()
        self.both.grow([slots[number] for number in sorted(some)], PAGE_NBYTES * pages)

    @precondition(lambda self: self.saves(is_sent=True))
    @rule(pages=st.integers(1, 5))
    def grow_what_a_save_waits_for(self, pages: int) -> None:
        save = self.saves(is_sent=True)[-1]
        leased = self.both.leased(save)
        self.both.grow(leased, PAGE_NBYTES * pages, leased)
        self.both.own.update(self.both.pool.files_of(save.number))
        for slot in save.pair:
            slot.view[:] = 7

    @rule(ends=st.sampled_from([False, False, True]))
    def drain(self, ends: bool) -> None:
        if ends:
            self.both.pool.drained([slot for slot in self.both.pool.own if slot.drains])
        for slot in self.both.pool.own if not ends else ():
            slot.drains = slot.drains or slot.use is Use.HOLDS

    @precondition(lambda self: not self.lent)
    @rule()
    def lend(self) -> None:
        for name, own, slot in self.both.pairs():
            if slot.use is Use.HOLDS and own.segment is not None and not name.is_share:
                lent = self.both.own.lend(self.both.own.holding(name.number))
                self.lent.append((lent, lent.view.tobytes()))

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
        status = real(fd)
        names = [name for name in dir(status) if name.startswith("st_")]
        return types.SimpleNamespace(**{**{name: getattr(status, name) for name in names}, "st_ino": 7})

    with monkeypatch.context() as patched:
        patched.setattr(os, "fstat", fstat)
        for pages in (1, 2):
            both.grow(both.pool.own[:1], pages * PAGE_NBYTES)
            both.own.update(both.pool.news())
            assert both.own.own[0].view.nbytes == pages * PAGE_NBYTES


def test_a_file_that_both_ends_give_up_takes_no_new_file_of_its_name_with_it(both: Both) -> None:
    both.grow(both.pool.own, PAGE_NBYTES)
    save = both.take()
    assert save is not None and save.pair[0].segment is not None
    segment = save.pair[0].segment
    both.devices.append(Device())
    segment.writers.append(both.devices[0])
    both.pool.end_lease(save.number, [segment.inode])
    name, fd = both.memory.new_slot_name()  # of another rank
    os.close(fd)
    assert name == segment.name
    both.own.ended(save)
    assert name in both.memory.slot_names()


class NothingFree:
    """A courier all of whose slots are in use."""

    def lease(self, number: int, leave: bool, lent: object) -> list[SlotFile]:
        return []

    def release(self, number: int, given_up: object) -> None: ...


def test_an_exception_anywhere_in_the_wait_for_a_slot_leaves_nothing_locked(node_memory: NodeDirectory) -> None:
    """As of a signal's handler, which may come between any two lines, and where a function is entered or left."""
    own = OwnSlots(node_memory, 2, NothingFree())
    for number in itertools.count(1):
        taker = object()
        was_left = interrupted(lambda taker=taker: own.take(0.001, taker), number)
        other = threading.Thread(target=own.give_back, args=(taker,), daemon=True)
        other.start()
        other.join(PATIENCE_S)
        assert not other.is_alive(), f"after {number} events a lock is held by nobody"
        if not was_left:
            break
    assert number > 21


def test_a_report_that_the_answer_to_a_lease_has_overtaken_changes_nothing(both: Both) -> None:
    both.grow(both.pool.own, PAGE_NBYTES)
    late = both.pool.news()
    both.grow(both.pool.own, 2 * PAGE_NBYTES)
    save = both.take()
    both.own.update(late)
    assert save is not None and save.pair[0].segment is save.segments[0] and save.pair[0].view.nbytes == 2 * PAGE_NBYTES
