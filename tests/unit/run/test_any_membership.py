"""No rank has two processes, or none, whatever happens in whatever order to a training that goes on in them."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from unit.membership_job import KILLED, Job


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
