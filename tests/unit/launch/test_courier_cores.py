"""Which cores couriers get: those that no trainer has, near to their trainer, shared evenly."""

from __future__ import annotations

import os

import pytest

from mlflash.launch import courier_cores
from mlflash.launch.courier_cores import Domains, RankCores, choose, choose_among, from_list, own_rank_cores, to_list

ALL = frozenset(range(16))
# Two sockets, cores 0-3 and 4-7; the second halves of these are 8-11 and 12-15.
HOST = Domains(lambda core: from_list("0-3,8-11" if core % 8 < 4 else "4-7,12-15"),
               lambda core: frozenset({core % 8, core % 8 + 8}))  # fmt: skip
FLAT = Domains(lambda core: frozenset(), lambda core: frozenset({core}))


def chosen(trainers: list[str], domains: Domains = HOST, may_have: frozenset[int] = ALL) -> list[str]:
    """What each courier of a host gets; "": what its trainer has."""
    seats = [RankCores(from_list(cores), may_have) for cores in trainers]
    return [to_list(choose(seats, mine, domains) or ()) for mine in range(len(seats))]


@pytest.mark.parametrize(
    ("trainers", "domains", "couriers"),
    [
        (["0-15"], HOST, [""]),  # not bound: nothing is free
        (["0-7", "8-15"], HOST, ["", ""]),  # bound to all that there is
        (["0-2,8-10"], HOST, ["3,11"]),  # a whole core of the same socket, not one of the other
        (["0,8", "1,9"], HOST, ["2,10", "3,11"]),  # shared evenly, both halves together
        (["0,8", "4,12"], HOST, ["1-3,9-11", "5-7,13-15"]),  # each in its own socket
        (["0-3,8-11"], HOST, ["4-7,12-15"]),  # only the other socket has any
        (["0-3", "4-7"], HOST, ["8-11", "12-15"]),  # only second halves are free: better than the trainer's own
        (["0-6", "7-13"], FLAT, ["14", "15"]),
        (["0-6", "7-13", "0-6"], FLAT, ["14-15"] * 3),  # too few for one each: they share all
    ],
)
def test_couriers_get_what_no_trainer_has(trainers: list[str], domains: Domains, couriers: list[str]) -> None:
    assert chosen(trainers, domains) == couriers


def test_a_job_gets_no_more_than_its_cgroup_leaves_it() -> None:
    assert chosen(["0,8"], may_have=from_list("0-1,8-9")) == ["1,9"]
    assert chosen(["0,8"], may_have=from_list("0,8")) == [""]


def test_what_ranks_tell_of_their_cores_is_read_in_the_order_of_ranks() -> None:
    texts = {rank: RankCores(frozenset({rank}), from_list("2,9-10,900-905")).to_text() for rank in (10, 9, 2)}
    assert [to_list(choose_among(texts, rank) or ()) for rank in (2, 9, 10)] == ["900-901", "902-903", "904-905"]
    for wrong in ("", "0-3", "0-3 x", "0 99999", "0 1 2"):
        with pytest.raises(ValueError, match=r".+"):
            choose_among({0: wrong}, 0)


def test_lists_are_those_of_the_kernel() -> None:
    for text in ("0", "0-3,8", "1,3,5-7"):
        assert to_list(from_list(text)) == text
    for text in ("", "7-1", "a", "0-", "1,,2", "auto", "-1"):
        with pytest.raises(ValueError, match="is not a list of cores"):
            from_list(text)


def test_what_a_process_could_have_is_found_and_its_mask_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.sched_getaffinity(0)
    seat = own_rank_cores({})
    assert os.sched_getaffinity(0) == before == seat.trains_on <= seat.may_have
    monkeypatch.setattr(courier_cores, "_could_have", lambda: seat.trains_on | {998, 999})
    assert own_rank_cores({}).may_have == seat.trains_on | {998, 999}
    told = {"SLURM_CPUS_ON_NODE": str(len(before))}  # of a Slurm that confines nobody: those may be another job's
    assert own_rank_cores(told).may_have == before
