"""Jobs that fail together, where couriers are started anew in the middle of one (`courier.units`)."""

from __future__ import annotations

import threading

from mlflash.courier.units import Units


def test_what_is_done_inside_of_a_unit_belongs_to_it_and_another_thread_to_its_own() -> None:
    units = Units()
    seen: list[int] = []
    with units.unit():
        first = units.number
        with units.unit(joins=True):
            assert units.number == first
        with units.unit():  # such as a restore in a restore's own call
            assert units.number == first + 1
        assert units.number == first
        other = threading.Thread(target=lambda: seen.append(units.number))
        other.start()
        other.join(10)
    assert seen == [0] and units.number == 0


def test_a_unit_that_a_rank_was_in_fails_with_all_before_it_and_none_after_it() -> None:
    here, there = Units(), Units()
    with here.unit():
        here.interrupt()
        assert here.interrupted == 1
        there.interrupt()
        assert there.interrupted == 0, "it was in none"
        newest = max(here.interrupted, there.interrupted)  # as the ranks agree on
        for units in (here, there):
            units.fail(newest)
        assert here.has_failed(here.number)
    for units in (here, there):
        assert not units.has_failed(0), "what is in no unit goes on"
        with units.unit():
            number = units.number
        assert (number, units.has_failed(number)) == ((2, False) if units is here else (1, True))


def test_a_unit_that_has_failed_stays_so_when_couriers_end_again() -> None:
    units = Units()
    with units.unit():
        units.interrupt()
        units.fail(units.interrupted)
        units.interrupt()
        units.fail(0)
        assert units.has_failed(units.number) and units.interrupted == 1
