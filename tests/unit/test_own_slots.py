"""A rank's own slots, between its trainer and its courier: each has one owner at any time, whatever comes."""

from __future__ import annotations

import itertools
import os
import random
import threading
import types
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
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

    def __init__(self, memory: NodeDirectory, count: int, is_thread: bool):
        self.memory = memory
        self.pool = SlotPool(memory, [], slots=count)
        self.own = OwnSlots(memory, count, self.pool.mapped if is_thread else dict)
        self.pool.trainer = self.own
        self.saves: list[Save] = []
        self.lent: list[Slot] = []
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
        self.lent.clear()
        assert not self.own.is_device_stuck
        self.own.close()
        self.pool.close()


@pytest.fixture(params=[True, False], ids=["thread", "process"])
def both(request: pytest.FixtureRequest, node_memory: NodeDirectory) -> Iterator[Both]:
    made = Both(node_memory, 2, request.param)
    made.news()
    yield made
    made.close()


def with_files(both: Both) -> None:
    borrowed = both.grow(both.pool.all(), PAGE_NBYTES)
    assert len(borrowed) == 4
    both.news()


def saved(both: Both) -> Save:
    save = both.take()
    assert save is not None
    both.send(save)
    both.finish(save, committed=True)
    return save


def test_a_trainer_hears_of_a_file_that_is_larger_now_and_is_the_same(both: Both) -> None:
    with_files(both)
    both.pool.take_back()  # as a start does, for which a file may be too short
    for _, _, theirs in both.pairs():
        assert theirs.segment is not None
        old, theirs.segment = theirs.segment, None
        unmap(theirs)
        theirs.segment = shared_memory_segment.grow(both.memory, old, 3 * PAGE_NBYTES)
        assert theirs.segment.inode == old.inode
    both.news()
    both.check()
    assert {mine.view.nbytes for _, mine, _ in both.pairs()} == {3 * PAGE_NBYTES}


def test_slots_that_exchange_their_files_keep_the_mappings_of_these(both: Both) -> None:
    """They do so after each restore; pages of another mapping would have to be faulted in, and pinned, once more."""
    with_files(both)
    before = [slot.view.ctypes.data for slot in both.own.own]
    both.pool.take_back()
    first, second = both.pool.own
    first.segment, second.segment = second.segment, first.segment
    both.news()
    both.check()
    assert [slot.view.ctypes.data for slot in both.own.own] == before[::-1]


def step(both: Both, rng: random.Random) -> str:
    """Do one thing that may happen now."""
    filling = [save for save in both.saves if not save.is_sent]
    sent = [save for save in both.saves if save.is_sent]
    what = rng.choice(["take", "give back", "send", "send", "commit", "commit", "fail", "news", "news some", "grow",
                       "grow waiting", "drain", "drained", "lend", "return", "device", "devices end"])  # fmt: skip
    drained = [slot for slot in both.pool.own if slot.drains]
    match what:
        case "take":
            both.take(leave=rng.random() < 0.3)
        case "give back" if filling:
            both.give_back(rng.choice(filling))
        case "send" if filling:
            both.send(filling[0])
        case "commit" | "fail" if sent:
            both.finish(sent[0], what == "commit")
        case "news":
            both.news()
        case "news some":
            both.news(rng.sample(both.pool.all(), 2))
        case "grow":
            both.grow(rng.sample(both.pool.all(), 2), PAGE_NBYTES * rng.randrange(1, 6))
        case "grow waiting" if sent:
            both.grow(sent[-1].got, PAGE_NBYTES * rng.randrange(1, 6), sent[-1].got)
        case "drain":
            for slot in both.pool.own:
                slot.drains = slot.drains or slot.use is Use.HOLDS
        case "drained" if drained:
            both.pool.drained(drained)
        case "lend":
            for name, mine, theirs in both.pairs():
                if theirs.use is Use.HOLDS and mine.segment is not None and not name.is_share:
                    both.lent.append(both.own.lend(both.own.holding(name.number)))
        case "return" if both.lent:
            both.lent.pop(rng.randrange(len(both.lent)))
        case "device" if filling:
            for slot in filling[0].pair:
                if slot.segment is not None:
                    both.devices.append(Device())
                    slot.segment.writers.append(both.devices[-1])
        case "devices end":
            for device in both.devices:
                device.is_done = True
        case _:
            return ""
    return what


@pytest.mark.parametrize("is_thread", [True, False], ids=["thread", "process"])
@pytest.mark.parametrize("seed", range(6))
def test_every_slot_has_one_owner_after_each_step_of_a_walk(
    node_memory: NodeDirectory, seed: int, is_thread: bool
) -> None:
    rng = random.Random(seed)
    both = Both(node_memory, 2 + seed % 2, is_thread)
    done = set()
    try:
        for _ in range(400):
            done.add(step(both, rng))
            both.check()
    finally:
        both.close()
    assert {"take", "give back", "send", "commit", "fail", "grow", "grow waiting", "lend", "drained"} <= done


def test_a_save_gets_the_slot_that_does_not_hold_the_newest(both: Both) -> None:
    with_files(both)
    first, second = saved(both), saved(both)
    assert both.take() is None
    both.news()
    third = both.take()
    assert third is not None and third.pair == first.pair != second.pair


def test_a_slot_that_a_drain_reads_is_not_given(both: Both) -> None:
    with_files(both)
    first = saved(both)
    first.got[0].drains = True
    saved(both)
    both.news()
    both.check()
    assert first.pair[0].use is Use.HOLDS and both.take() is None
    both.pool.drained([first.got[0]])
    both.news()
    again = both.take()
    assert again is not None and again.pair[0] is first.pair[0]


def test_a_file_that_a_device_still_writes_is_given_up_and_the_slot_gets_another(both: Both) -> None:
    with_files(both)
    save = both.take()
    assert save is not None and save.pair[0].segment is not None
    stuck, device = save.pair[0].segment, Device()
    stuck.writers.append(device)
    both.give_back(save)
    assert save.pair[0].segment is None and both.own.is_device_stuck
    assert stuck.name not in both.memory.slot_names() and stuck.view.nbytes == PAGE_NBYTES
    slot = save.pair[0]
    while (save := both.take()) is not None and save.pair[0] is not slot:
        both.send(save)
    assert save is not None
    both.send(save)
    both.grow(save.got, PAGE_NBYTES, save.got)
    both.news(())
    assert slot.segment is not None and slot.segment.inode != stuck.inode and slot.use is Use.BUSY
    slot.view[:] = 1
    assert not stuck.view.any()
    device.is_done = True
    assert not both.own.is_device_stuck and stuck.view.nbytes == 0


def test_a_file_that_vanished_is_passed_over(node_memory: NodeDirectory, caplog: pytest.LogCaptureFixture) -> None:
    both = Both(node_memory, 2, is_thread=False)
    both.grow(both.pool.all(), PAGE_NBYTES)
    gone = both.pool.own[0].name
    node_memory.remove(gone)
    both.news()
    both.check()
    assert both.own.own[0].segment is None and both.own.own[0].use is Use.FREE
    assert both.own.own[1].segment is not None and f"{gone} is passed over" in caplog.text
    save = both.take()
    assert save is not None and save.pair[0] is both.own.own[0]
    both.send(save)
    assert both.pool.own[0].segment is None
    both.close()


def test_news_of_some_slots_gives_no_more_than_these(both: Both) -> None:
    with_files(both)
    first = saved(both)
    saved(both)
    some = first.got[0]
    assert [(told.slot, told.is_free) for told in both.news([some])] == [(SlotId(False, 0), True)]
    assert first.pair[0].use is Use.FREE and first.pair[1].use is Use.HOLDS
    assert [(told.slot, told.is_free) for told in both.news()] == [(SlotId(True, 0), True)]
    assert both.news() == []


def test_news_of_a_file_come_also_where_the_slot_is_not_given(both: Both) -> None:
    borrowed = both.grow(both.pool.all(), PAGE_NBYTES)
    assert len(borrowed) == 4
    assert [told.is_free for told in both.news(())] == [False] * 4
    assert all(mine.use is Use.HOLDS and mine.view.nbytes == PAGE_NBYTES for _, mine, _ in both.pairs())
    assert [told.is_free for told in both.news()] == [True] * 4


@pytest.mark.parametrize("both", [False], indirect=True, ids=["process"])
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


def test_what_is_lent_is_neither_filled_nor_changed(both: Both) -> None:
    with_files(both)
    first = saved(both)
    assert first.pair[0].segment is not None
    lent = both.own.lend(both.own.holding(0))
    lent.view[:] = 7
    assert not first.pair[0].view.any()
    saved(both)
    both.news()
    assert both.take() is None
    left = both.take(leave=True)
    assert left is not None and left.pair[0] is first.pair[0] and left.pair[0].segment is None
    assert np.all(lent.view == 7)
    both.check()


def test_what_is_returned_may_be_filled_again(both: Both) -> None:
    with_files(both)
    first = saved(both)
    lent = [both.own.lend(both.own.holding(0))]
    saved(both)
    both.news()
    assert both.take() is None
    lent.clear()
    again = both.take()
    assert again is not None and again.pair[0] is first.pair[0] and again.pair[0].segment is not None


def test_all_slots_are_left_to_the_next_courier_once_none_is_filled(both: Both) -> None:
    with_files(both)
    save = both.take()
    assert save is not None and not both.own.wait_until_given(0.01, lambda taker: False), "one is still filled"
    assert not both.take(), "the free ones are given already"
    both.own.give_back(both.own.taken_by(save))
    assert both.own.wait_until_given(0.01, lambda taker: False), "one that is given back meanwhile is left, too"


def test_a_slot_that_is_still_filled_is_not_waited_for_in_a_busy_loop(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_files(both)
    looks = itertools.count()
    prepare = both.own.prepare
    monkeypatch.setattr(both.own, "prepare", lambda wanted: (next(looks), prepare(wanted))[1])
    assert both.take() is not None and not both.own.wait_until_given(0.2, lambda taker: False)
    assert next(looks) <= 6, "which would take the interpreter from the thread that fills it"


def test_slots_of_saves_that_have_failed_are_left_to_the_next_courier(both: Both) -> None:
    with_files(both)
    save = both.take()
    assert save is not None and not both.own.wait_until_given(0.01, lambda taker: False)
    assert both.own.wait_until_given(0.01, lambda taker: taker is save) and not both.own.taken_by(save)
    assert {slot.use for slot in (*both.own.own, *both.own.shares)} == {Use.HOLDS}


def test_what_a_device_still_writes_is_given_to_no_courier(both: Both) -> None:
    with_files(both)
    save, device = both.take(), Device()
    assert save is not None and save.pair[0].segment is not None
    name = save.pair[0].name
    save.pair[0].segment.writers.append(device)
    both.own.reclaim(lambda taker: taker is save)
    assert save.pair[0].segment is None and name not in both.memory.slot_names() and both.own.is_device_stuck
    device.is_done = True
    assert not both.own.is_device_stuck


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


def test_an_open_slot_is_unmapped_by_itself_and_outlives_what_the_slots_do(both: Both) -> None:
    with_files(both)
    own = both.pool.own[0].segment
    assert own is not None
    number = int(own.name.rpartition("-")[2])
    one, other = both.pool.open(number), both.pool.open(number)
    assert one.segment is not None and one.segment.view is own.view  # no page is faulted in again
    both.pool.unmap_others([one])
    assert one.segment.view.nbytes == 0 < own.view.nbytes
    own.close()
    assert own.view.nbytes == 0 < other.view.nbytes
