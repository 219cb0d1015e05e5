"""Who has which rank of a training that goes on where processes are lost, by a clock of ours."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.membership_job import KILLED, Job

from mlflash.run.membership import NEVER


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


@pytest.mark.parametrize(
    ("second", "kind", "step", "is_over"),
    [("ValueError: bad batch 18", "error", 20, True), ("ValueError: bad batch 17", "error", 21, False),
     ("KeyError: 1", "error", 20, False), ("ValueError: bad batch 17", "killed", 20, False)],
)  # fmt: skip
def test_the_same_error_after_the_same_step_is_the_end(second: str, kind: str, step: int, is_over: bool) -> None:
    job = Job("a b", "c d")
    for spare, text, at in (("c0", "ValueError: bad batch 17", 20), ("d0", second, step)):
        lost = "b0" if spare == "c0" else "c0"
        job.end(lost, code=1, why=text, kind=kind)
        job.leave("a0")
        assert not job.it.over
        job.train("a0", spare, step=at)
    assert job.it.is_repeated == bool(job.it.over) == is_over and len(job.notes) == 2 - is_over
    if is_over:
        assert job.it.over == f"rank 1 ({second}) was lost, by the same error as before, after step 20 again"
        assert job.it.code == 1 and job.notes[0][1]["cause"]["text"] == "ValueError: bad batch 17"


def test_a_rank_that_only_lost_its_connection_is_not_the_cause() -> None:
    job = Job("a b c", "d e")
    job.end("a0", code=1, why="Connection reset by peer", kind="peer")
    job.end("b0", code=1, why="ValueError: bad batch", kind="error")
    assert job.it.cause.text == "ValueError: bad batch"
    job.end("c0", code=1, why="KeyError", kind="error")
    assert job.it.over == "all ranks were lost, the last one ranks 0, 1, 2 (ValueError: bad batch)"


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
        job.crash("a")
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


def test_the_others_go_on_with_fewer_ranks_and_with_more_when_somebody_waits() -> None:
    job = Job("a b c d", least=2)
    job.end("b0", "c0")
    job.leave("a0")
    assert job.it.round == 1
    job.hears()
    job.leave("d0")
    assert job.it.round == 2 and job.it.size == 2 and job.seats() == {"a0": "2: 0", "d0": "2: 1"}
    assert not job.started, "imports of others would slow this down"
    job.train("a0", "d0", step=20)
    assert job.started == ["b0.1", "c0.2"]
    job.ready("b0.1")
    assert not job.hears(), "another one is about to be ready"
    job.ready("c0.2")
    assert job.hears() == {"a0": ["pause 2"], "d0": ["pause 2"]}
    job.it.saved("a0", 2, 21)
    job.it.saved("d0", 2, 22)
    assert job.hears() == {"a0": ["pause after 22"], "d0": ["pause after 22"]}
    job.it.paused("a0", 2, job.now)
    assert not job.hears()
    job.it.paused("d0", 2, job.now)
    assert job.hears() == {"a0": ["lost 2"], "d0": ["lost 2"]}
    job.leave("a0", "d0")
    assert job.it.size == 4 and job.seats() == {"a0": "3: 0", "d0": "3: 1", "b0.1": "3: 2", "c0.2": "3: 3"}
    job.train("a0", "b0.1", "c0.2", "d0", step=23)
    assert [event for event, _ in job.notes] == ["recovered", "moved"]
    assert job.notes[-1][1]["ranks"] == 4 and job.notes[-1][1]["lost"] == []


@pytest.mark.parametrize(
    ("unit", "seats"), [(2, {"a0": "2: 0", "b0": "2: 1"}), (1, {"a0": "2: 0", "b0": "2: 1", "d0": "2: 2"})]
)
def test_whole_replicas_go_on(unit: int, seats: dict[str, str]) -> None:
    job = Job("a b c d", least=1)
    job.hears()
    job.end("c0")
    job.hears()
    job.leave("a0", "b0", "d0", unit=unit)
    assert job.seats() == seats
    job.train(*seats)
    assert not job.hears(), "who has no rank now waits, and is too few for another replica"
    job.ready("c0.1")
    assert job.seats() == dict.fromkeys(seats, "pause 2")


def test_a_number_of_ranks_that_cannot_change_waits_for_a_process() -> None:
    job = Job("a b c", least=1)
    job.end("b0")
    job.leave("a0", "c0", unit=0)
    assert job.it.round == 1 and job.started == ["b0.1"]
    job.ready("b0.1")
    assert job.it.round == 2 and job.it.size == 3


def test_ranks_move_to_other_hosts_after_a_save_that_all_have_committed() -> None:
    job = Job("a b", "c c")
    assert job.move("b") == ""
    assert job.hears() == {"a0": ["pause 1"], "b0": ["pause 1"]}
    job.pause("a0", "b0", saved=14)
    assert job.hears() == {name: ["pause after 14", "lost 1"] for name in ("a0", "b0")}
    job.leave("a0", "b0")
    assert job.seats() == {"a0": "2: 0", "c0": "2: 1"} and job.killed == ["b0"]
    job.end("b0")
    job.train("a0", "c0", step=15)
    assert not job.started, "nothing is started on a host that is to be left"
    assert job.notes == [("moved", {"round": 2, "lost": [], "why": "b is to be left", "step": 15, "ranks": 2,
                                    "seconds": 0.0, "times": {}})]  # fmt: skip
    assert job.move("c") == "1 processes on other hosts are too few for 2 ranks"
    job.crash("b")
    job.back("b")
    job.ready(job.started[-1])
    assert job.move("c") == ""


def test_a_loss_in_a_plan_comes_first_and_the_plan_is_made_again() -> None:
    job = Job("a b c", "d e")
    job.move("a")
    job.it.saved("b0", 1, 10)
    job.end("c0")
    job.hears()
    job.leave("a0", "b0")
    assert job.seats() == {"d0": "2: 0", "b0": "2: 1", "e0": "2: 2"} and job.killed == ["a0"]


def test_all_go_on_if_some_do_not_come_to_the_next_save() -> None:
    job = Job("a b", "c")
    job.move("b")
    job.it.saved("a0", 1, 10)
    job.it.saved("b0", 1, 10)
    job.it.paused("a0", 1, job.now)
    job.hears()
    job.later(120)
    assert job.hears() == {"a0": ["go on 1"], "b0": ["go on 1"]} and not job.killed
    job.it.paused("b0", 1, job.now)
    assert not job.hears() and job.it.round == 1
    job.later(120)
    assert job.hears() == {"a0": ["pause 1"], "b0": ["pause 1"]}, "the plan is made again"


def test_the_rank_that_others_wait_for_hangs_and_is_replaced() -> None:
    job = Job("a b c", "d")
    job.stuck("c0", 12)
    assert job.hears() == {"a0": ["where 1"], "b0": ["where 1"]}
    job.stuck("a0", 12)
    assert not job.killed
    job.stuck("b0", 11, idle_s=70.5)
    assert job.killed == ["b0"]
    event, fields = job.notes[-1]
    job.stuck("a0", 12)  # it says so by itself, and was asked
    job.stuck("b0", 11)
    assert job.killed == ["b0"] and not job.given_up and len(job.notes) == 1
    assert event == "hang" and fields["rank"] == 1 and fields["seconds"] == 70.5 and fields["others"] == ["allreduce"]
    job.end("b0")
    job.hears()
    job.leave("a0", "c0")
    assert job.seats() == {"a0": "2: 0", "d0": "2: 1", "c0": "2: 2"}
    job.train("a0", "c0", "d0", step=20)
    assert job.notes[-1][1]["why"] == "it hung in b0.py:7 (step), after allreduce"


def test_a_rank_that_waits_in_no_group_of_some_ranks_while_others_do_hangs() -> None:
    job = Job("a b c", "d")
    job.stuck("a0", 0)
    job.stuck("b0", 0, waits=False)
    job.stuck("c0", 0)
    assert job.killed == ["b0"]


def test_a_rank_whose_interpreter_does_not_answer_hangs() -> None:
    job = Job("a b", "c")
    job.stuck("a0", 12)
    job.later(4.9)
    assert not job.killed
    job.later(0.1)
    assert job.killed == ["b0"] and job.notes[-1][1]["why"] == "it hung, and its Python does not run"


def test_a_rank_that_makes_progress_is_slow_and_does_not_hang() -> None:
    job = Job("a b", "c")
    job.stuck("a0", 12)
    job.stuck("b0", 11, idle_s=1.0)
    job.later(1000.0)
    assert not job.killed and job.it.until == NEVER and job.it.round == 1


def test_if_all_wait_for_each_other_they_go_back_together() -> None:
    job = Job("a b", "c")
    job.hears()
    job.stuck("a0", 12)
    job.stuck("b0", 12)
    assert not job.killed and job.hears() == {"a0": ["lost 1"], "b0": ["where 1", "lost 1"]}
    job.leave("a0", "b0")
    assert job.seats() == {"a0": "2: 0", "b0": "2: 1"}


def test_lost_ranks_are_named_as_they_were_when_all_trained() -> None:
    job = Job("a b c", least=1)
    job.end("a0")
    job.hears()
    job.leave("b0", "c0", unit=1)
    assert job.seats() == {"b0": "2: 0", "c0": "2: 1"}
    job.end("b0")
    job.hears()
    job.leave("c0", unit=1)
    job.train("c0", step=20)
    assert job.notes[-1][1]["lost"] == [0, 1]


def test_a_number_of_ranks_that_cannot_change_does_not_grow_either() -> None:
    job = Job("a b", "c", most=3, begins=False)
    job.ready("a0", "b0", "c0")
    job.train("a0", "b0", unit=0)
    assert not any("pause" in word for words in job.hears().values() for word in words)
    job.end("b0")
    job.leave("a0", unit=0)
    assert job.it.round == 2 and job.it.size == 2


def test_what_any_rank_knows_of_the_number_of_ranks_counts() -> None:
    job = Job("a b c d", least=1)
    job.end("d0")
    job.leave("a0", unit=0)  # it alone has a group of some ranks
    job.leave("b0", "c0", unit=1)
    assert job.it.round == 1 and job.started


def test_a_rank_whose_steps_take_longer_is_not_killed_before_its_time() -> None:
    job = Job("a b", "c")
    job.stuck("a0", 12)
    job.stuck("b0", 11, idle_s=70.0, limit_s=600.0)
    assert not job.killed
    job.stuck("b0", 11, idle_s=601.0, limit_s=600.0)
    job.stuck("a0", 12, idle_s=601.0)
    assert job.killed == ["b0"]


def test_a_hung_process_that_does_not_end_is_given_up_with_its_host() -> None:
    job = Job("a b", "c")
    job.stuck("a0", 12)
    job.stuck("b0", 11)
    job.later(120)
    job.later(120)
    assert job.killed == ["b0", "b0"] and job.given_up == ["b"]
    job.crash("b")
    job.leave("a0")
    assert job.it.round == 2


def test_hosts_are_left_as_far_as_processes_wait() -> None:
    job = Job("a b", "c")
    assert job.move("a") == ""
    assert job.move("b") == "1 processes on other hosts are too few for 2 ranks"
    job.pause("a0", "b0")
    job.leave("a0", "b0")
    assert job.it.hosts == ("c", "b") and job.killed == ["a0"]


def test_a_rank_that_works_on_after_others_have_finished_does_not_hang() -> None:
    job = Job("a b", "c")
    job.it.done("b0", 1)
    job.stuck("a0", 12)
    job.stuck("b0", 13)
    assert not job.killed and job.it.round == 1 and not job.it.over
    job.end("b0", code=0)
    job.stuck("a0", 12, idle_s=700.0)
    job.later(1000)
    assert not job.killed and not job.it.over


def test_ranks_that_all_compute_do_not_hang() -> None:
    job = Job("a b", "c")
    job.stuck("a0", 12, waits=False)
    job.stuck("b0", 12, waits=False)
    assert not job.killed and job.it.round == 1 and job.it.until == NEVER


def test_spares_of_a_host_that_is_to_be_left_do_not_count_as_failed_starts() -> None:
    job = Job("a b", "c c c c d", begins=False)
    job.ready("a0", "b0", "d0")
    job.train("a0", "b0")
    assert job.move("c") == ""
    job.end(*(f"c{number}" for number in range(4)))
    job.end("b0")
    job.leave("a0")
    job.train("a0", "d0")
    assert job.started == ["b0.1"]


def test_ranks_come_back_less_often_if_that_fails() -> None:
    job = Job("a b", least=1)
    waits = []
    for number in range(1, 4):
        job.hears()
        job.end(f"b0.{number - 1}" if number > 1 else "b0")
        job.leave("a0")
        job.train("a0", step=10 * number)
        job.ready(f"b0.{number}")
        began = job.now
        while f"pause {job.it.round}" not in job.hears().get("a0", []):
            job.later(max(0.0, job.it.until - job.now))
        waits.append(job.now - began)
        job.pause("a0", saved=10 * number + 1)
        job.leave("a0")
        assert job.it.size == 2
    assert waits == [0.0, 60.0, 120.0]


def test_a_spare_that_hangs_in_its_imports_is_killed_and_others_come_back() -> None:
    job = Job("a b c d", least=2)
    job.end("b0", "c0")
    job.leave("a0", "d0")
    job.train("a0", "d0", step=20)
    job.ready("b0.1")
    job.hears()
    job.later(120)
    assert job.killed == ["c0.2"]
    job.end("c0.2")
    job.ready(job.started[-1])
    assert job.hears() == {"a0": ["pause 2"], "d0": ["pause 2"]}


# Whatever happens in whatever order, no rank has two processes, or none


@dataclasses.dataclass
class Process:
    """One that answers what it is told."""

    host: str
    is_alive: bool = True
    is_ready: bool = False
    seat: tuple[int, int] | None = None  # round and rank
    owes: str = "ready"
    saved: int = 0
    pauses_after: int | None = None


class World(Job):
    """Processes that answer when it is their turn; what must hold is asserted whatever they are told."""

    def __init__(self, ranks: str, spares: str, least: int, unit: int):
        self.unit = unit
        self.processes: dict[str, Process] = {}
        self.holders: dict[tuple[int, int], str] = {}
        self.dead_hosts, self.lost_told = set[str](), set[tuple[str, int]]()
        super().__init__(ranks, spares, begins=False, least=least)
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
            assert message["seat"]["size"] == self.it.size
        elif "where" in message:
            pass
        elif "pause" in message:
            one.owes = "saved"
        elif "pause_after" in message:
            one.pauses_after = message["step"]
            assert one.saved <= message["step"]
            one.owes = "paused"
        elif "go_on" in message:
            one.owes = ""
        else:
            assert one.seat is not None and message["lost"] == one.seat[0]
            one.owes = "left"
            self.lost_told.add((name, message["lost"]))

    def start(self, host: str, local: int) -> str:
        assert host not in self.dead_hosts
        name = super().start(host, local)
        self.processes[name] = Process(host)
        return name

    def _unit_of(self, name: str) -> int:
        return self.unit if name.endswith("0") else 1

    def living(self) -> list[str]:
        return [name for name, one in self.processes.items() if one.is_alive]

    def answer(self, name: str) -> None:
        one = self.processes[name]
        owes, one.owes = one.owes, ""
        if owes == "ready":
            one.is_ready = True
            self.ready(name)
        elif owes == "left":
            self.leave(name, unit=self._unit_of(name))
        elif owes == "saved":
            one.saved += 1
            self.it.saved(name, self.it.round, one.saved)
        elif owes == "paused":
            one.saved = (one.pauses_after or 0) + 1
            self.it.paused(name, self.it.round, self.now)
        elif owes == "here":
            self.it.here(name, self.it.round)
            one.owes = "trains"
        elif owes == "trains":
            self.train(name, step=self.it.round, unit=self._unit_of(name))

    def die(self, name: str, code: int) -> None:
        self.processes[name].is_alive = False
        self.end(name, code=code)

    def burn(self, host: str) -> None:
        self.dead_hosts.add(host)
        for one in self.processes.values():
            one.is_alive = one.is_alive and one.host != host
        self.crash(host)

    def build(self, host: str) -> None:
        """Have a host back that burnt."""
        if host in self.dead_hosts:
            self.dead_hosts.remove(host)
            self.back(host)

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
    elif kind < 32:
        world.move("abcd"[who % 4])
    elif kind < 33 and living:
        name = living[who % len(living)]
        if world.processes[name].seat == (world.it.round, world.it.members[name].rank):
            world.stuck(name, who, idle_s=70.0 if who % 3 else 1.0, waits=bool(who % 2))
    else:
        world.bury()


PLACES = st.lists(st.sampled_from("abcd"), min_size=2, max_size=4).map(" ".join)
EVENTS = st.lists(st.tuples(st.integers(0, 35), st.integers(0, 99)), min_size=20, max_size=80)


@settings(max_examples=200, deadline=None, database=None)
@given(PLACES, st.just("") | PLACES, st.booleans(), st.integers(0, 3), st.integers(0, 2), EVENTS)
def test_whatever_happens_no_rank_has_two_processes_or_none_and_it_comes_to_an_end(
    ranks: str, spares: str, begins: bool, least: int, unit: int, events: list[tuple[int, int]]
) -> None:
    world = World(ranks, spares, least, unit)
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
