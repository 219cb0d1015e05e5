"""Who has which rank of a training that goes on where processes are lost, by a clock of ours."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.membership_job import KILLED, Job


def test_one_that_does_not_leave_in_time_is_killed_and_replaced() -> None:
    job = Job("a b c", "d e")
    job.end("b0")
    job.leave("a0")
    assert job.it.until == job.now + 30
    job.later(29)
    assert not job.killed
    job.later(1)
    assert job.killed == ["c0"] and job.notes == [("late", {"round": 1, "rank": 2, "phase": "leaving"})]
    job.later(119)
    assert job.killed == ["c0"]
    job.later(1)
    assert job.killed == ["c0", "c0"]  # its agent may not have heard it
    job.end("c0")
    assert job.it.round == 2 and job.seats()["e0"] == "2: 2"


def test_who_waits_in_a_round_for_one_that_does_not_come_is_not_killed_with_it() -> None:
    job = Job("a b c", "d e")
    job.end("b0")
    job.leave("a0", "c0")
    job.it.here("a0", 1)  # of the last round
    for name in ("c0", "d0"):
        job.it.here(name, 2)
    job.later(120)
    assert job.killed == ["a0"]
    job.end("a0")
    job.leave("c0", "d0")
    assert job.it.round == 3
    for name in ("c0", "d0", "e0"):
        job.it.here(name, 3)
    job.train("d0")
    job.later(120)
    assert job.killed == ["a0", "e0", "c0"]  # all are there, and nobody knows for whom two of them wait


def test_it_is_over_when_no_process_is_ready_in_time() -> None:
    job = Job("a b c")
    job.end("b0", code=9, why="it fell")
    job.end("c0", code=8)
    job.later(10)
    job.leave("a0")
    assert job.it.until == job.now + 120
    job.ready("b0.1")
    job.later(119.9)
    assert not job.it.over and job.it.code is None
    job.later(0.1)
    assert job.it.over == "no process was ready in time to take the place of ranks 1, 2 (it fell)" and job.it.code == 9
    assert not job.killed


@pytest.mark.parametrize("code", [3, 0])
def test_a_loss_before_all_have_begun_is_the_end(code: int) -> None:
    job = Job("a b", "c", begins=False)
    job.ready("a0", "b0", "c0")
    job.train("a0")
    job.end("b0", code=code, why="it fell")
    assert job.it.over == "rank 1 (it fell) was lost before all ranks had begun" and job.it.code == (code or 1)


@pytest.mark.parametrize("how", ["one by one", "their host"])
def test_it_is_over_when_all_ranks_are_lost(how: str) -> None:
    job = Job("a a", "c")
    if how == "their host":
        job.lose("a")
    else:
        job.end("a0", code=9, why="a burns")
        job.end("a1", code=8)
    assert job.it.over == "all ranks were lost, the last one ranks 0, 1 (a burns)"
    assert job.it.code == (9 if how == "one by one" else 255)


def test_rounds_that_fail_before_all_have_begun_are_not_tried_for_ever() -> None:
    job = Job("a b", "c d e f g h")
    job.end("b0")
    for name in "cde":
        job.leave("a0")
        job.end(f"{name}0", code=9, why=f"{name} fell")
        assert not job.it.over
    job.leave("a0")
    job.end("f0", why="f fell")
    assert job.it.over == "rank 1 (it was killed) was lost, and 3 rounds had failed before all ranks had begun"
    assert job.it.code == 137 and job.it.round == 5


def test_processes_that_end_before_they_are_ready_are_not_started_for_ever() -> None:
    job = Job("a b")
    job.end("b0")
    job.leave("a0")
    for number in range(1, 4):
        assert len(job.started) == number
        job.end(f"b0.{number}")
    assert len(job.started) == 3 and not job.it.over
    job.later(120)
    assert job.it.over.startswith("no process was ready in time")


def test_who_begins_its_program_anew_is_told_once_more_what_it_was_told() -> None:
    job = Job("a b", "c")
    job.end("b0")
    job.leave("a0")
    job.hears()
    job.it.text("a0", 2, "port", "4000")
    assert job.hears() == {"a0": ["4000"], "c0": ["4000"]}  # over a connection that ends unread
    job.ready("c0")
    assert job.hears() == {"c0": ["2: 1", "4000"]}
    job.train("a0", "c0", step=20)
    job.end("c0")
    job.ready("b0.1")
    job.leave("a0")
    job.hears()
    job.ready("b0.1")
    assert job.hears() == {"b0.1": ["3: 1"]}  # nothing of another round


# Whatever happens in whatever order, no rank has two processes, or none


@dataclasses.dataclass
class Process:
    """One that answers what it is told."""

    host: str
    is_alive: bool = True
    is_ready: bool = False
    seat: tuple[int, int] | None = None  # round and rank
    owes: str = "ready"


class World(Job):
    """Processes that answer when it is their turn; what must hold is asserted whatever they are told."""

    def __init__(self, ranks: str, spares: str):
        self.processes: dict[str, Process] = {}
        self.holders: dict[tuple[int, int], str] = {}
        self.dead_hosts, self.lost_told = set[str](), set[tuple[str, int]]()
        super().__init__(ranks, spares, begins=False)
        self.processes |= {one.name: Process(one.host) for one in self.members}

    def tell(self, name: str, message: dict[str, Any]) -> None:
        one = self.processes[name]
        assert one.is_alive, f"{name} has ended, and is told {message}"
        if "seat" in message:
            seat = message["seat"]["round"], message["seat"]["rank"]
            assert one.is_ready and (one.seat is None or one.seat < seat)
            assert self.holders.setdefault(seat, name) == name
            assert seat[0] == 1 or one.owes == "", f"{name} has not left {one.seat}, and gets {seat}"
            one.seat, one.owes = seat, "here"
        else:
            assert one.seat is not None and message["lost"] == one.seat[0]
            one.owes = "left"
            self.lost_told.add((name, message["lost"]))

    def start(self, host: str, local: int) -> str:
        assert host not in self.dead_hosts
        name = super().start(host, local)
        self.processes[name] = Process(host)
        return name

    def living(self) -> list[str]:
        return [name for name, one in self.processes.items() if one.is_alive]

    def answer(self, name: str) -> None:
        one = self.processes[name]
        owes, one.owes = one.owes, ""
        if owes == "ready":
            one.is_ready = True
            self.ready(name)
        elif owes == "left":
            self.leave(name)
        elif owes == "here":
            self.it.here(name, self.it.round)
            one.owes = "trains"
        elif owes == "trains":
            self.train(name, step=self.it.round)

    def die(self, name: str, code: int) -> None:
        self.processes[name].is_alive = False
        self.end(name, code=code)

    def burn(self, host: str) -> None:
        self.dead_hosts.add(host)
        for one in self.processes.values():
            one.is_alive = one.is_alive and one.host != host
        self.lose(host)

    def build(self, host: str) -> None:
        """Have a host back that burnt."""
        if host in self.dead_hosts:
            self.dead_hosts.remove(host)
            self.it.host_back(host)

    def bury(self) -> None:
        """Have those end that were killed."""
        for name in self.killed:
            if self.processes[name].is_alive:
                self.die(name, KILLED)

    def check(self) -> None:
        """All ranks of the newest round have a process, or those that have one know that this is over."""
        if self.it.over or (self.it.round == 1 and len(self.holders) < self.it.size):
            return
        number = self.it.round
        names = [self.holders[number, rank] for rank in range(self.it.size)]
        assert len(set(names)) == self.it.size
        codes = {name: self.it.members[name].code for name in names}
        if any(code not in (None, 0) for code in codes.values()):
            assert all((name, number) in self.lost_told for name in names if self.processes[name].is_alive)

    def is_well(self) -> bool:
        """Whether all train in the newest round, or all is over."""
        if self.it.over:
            return True
        names = [self.holders.get((self.it.round, rank), "") for rank in range(self.it.size)]
        return all(name and self.it.members[name].code in (None, 0) for name in names) and not any(
            self.processes[name].owes for name in self.living()
        )


def happens(world: World, kind: int, who: int) -> None:
    """One event: mostly somebody answers, sometimes one ends, seldom a host is lost."""
    living = world.living()
    owing = [name for name in living if world.processes[name].owes]
    if kind < 24 and owing:
        world.answer(owing[who % len(owing)])
    elif kind < 27 and living:
        name = living[who % len(living)]
        one = world.processes[name]
        world.die(name, 0 if who % 16 == 1 and one.seat is not None and not one.owes else 9)
    elif kind < 28:
        world.burn("abcd"[who % 4])
    elif kind < 30:
        world.later(50.0)
    elif kind < 31:
        world.build("abcd"[who % 4])
    else:
        world.bury()


PLACES = st.lists(st.sampled_from("abcd"), min_size=2, max_size=4).map(" ".join)
EVENTS = st.lists(st.tuples(st.integers(0, 31), st.integers(0, 99)), min_size=20, max_size=80)


@settings(max_examples=200, deadline=None, database=None)
@given(PLACES, st.just("") | PLACES, st.booleans(), EVENTS)
def test_whatever_happens_no_rank_has_two_processes_or_none_and_it_comes_to_an_end(
    ranks: str, spares: str, begins: bool, events: list[tuple[int, int]]
) -> None:
    world = World(ranks, spares)
    for name in [*world.processes] * 3 if begins else ():
        world.answer(name)
    for kind, who in events:
        happens(world, kind, who)
        world.check()
    for _ in range(20):  # now everybody answers
        if world.is_well():
            break
        for name in world.living():
            world.answer(name)
        world.bury()
        world.check()
        if not any(world.processes[name].owes for name in world.living()) and not world.is_well():
            world.later(world.it.until - world.now)
    assert world.is_well(), world.processes
    assert (world.it.code is None) == (not world.it.over)
