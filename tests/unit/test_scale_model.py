"""The model of benchmarks/scale: a case by hand, what more of something does, what nothing costs; and simulated MPI."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from scale import agreement, break_even, counted, forecast, memory_of_ranks, model, recoveries
from scale.parameters import PERLMUTTER, SLINGSHOT_11, TECTONIC, Fabric, FileSystem, Node, WireUp

from mlflash.placement.redundancy_scheme import parse
from mlflash.planning.interval import daly, inflation

pytestmark = pytest.mark.slow  # a tool beside the engine

SCHEMES = ("copy", "copy:2", "xor:8", "rs:6+2", "rs:8+3")
NODE = Node(gpus=4, nics=2, copy_Bps=10e9, check_Bps=10e9, xor_Bps=5e9, rs_Bps=4e9, poll_s=1e-3, start_s=1e-6,
            restore_s=2e-6, inventory_nbytes=250.0)  # fmt: skip
FABRIC = Fabric("by hand", alpha_s=1e-6, beta_Bps=20e9, loaded=0.5)
WIRE_UP = WireUp("by hand", address_nbytes=1000.0, serve_Bps=1e9, rank_s=1e-4, node_s=1e-5, fixed_s=0.25)
MACHINE = model.Machine(1024, NODE, FABRIC, nbytes=1e9, wire_up=WIRE_UP)
"""A rank has 20e9 x 0.5 x 2 / 4 = 5e9 bytes per second of the fabric."""


def test_a_commit_by_hand() -> None:
    # Copied 0.1 s; sent 0.2 s; checked where it leaves and where it arrives 0.2 s; two allreduces of 10 steps.
    assert model.committed_s(MACHINE, parse("copy")) == pytest.approx(0.1 + 0.2 + 0.2 + 2 * (10 * 1e-6 + 1e-3))
    # Sent 7/6 of 0.2 s; checked 0.1 s and 7/6 of it; coded 0.25 s.
    by_parity = 0.1 + 0.2 * 7 / 6 + 0.1 * 13 / 6 + 0.25 + 2 * (10 * 1e-6 + 1e-3)
    assert model.committed_s(MACHINE, parse("rs:6+2")) == pytest.approx(by_parity)


def test_a_restore_by_hand() -> None:
    # 256 nodes: 8 steps and 64 kB of tables, twice; the code 3 us a rank; checked 0.1 s; loaded 0.1 s.
    here = 3e-6 * 1024 + 2 * (8e-6 + 256 * 250 / 5e9 + 1e-3) + model.RESTORE_COLLECTIVES * (10e-6 + 1e-3) + 0.1 + 0.1
    # Couriers: 0.25 s, 0.1 ms for each rank; 256 addresses of 1 kB to 17 nodes, and by each of those to 16 more; 10
    # us for each node, on each of these two levels.
    here += 0.25 + 1e-4 * 1024 + (17 + 16) * 256 * 1000 / 1e9 + 2 * 1e-5 * 256
    assert model.restored_s(MACHINE, parse("copy"), node_lost=False) == pytest.approx(here)
    # From another node: 0.2 s, and checked once more.
    assert model.restored_s(MACHINE, parse("copy")) == pytest.approx(here + 0.3)
    # And before that each of 7 survivors gathers 6/7 of a slot and decodes it.
    assert model.restored_s(MACHINE, parse("rs:6+2")) == pytest.approx(here + 0.3 + 6 / 7 * (0.2 + 0.25))


def test_levels_of_the_tree_that_addresses_go_down() -> None:
    sizes = (1, 2, 17, 18, 1 + 16 + 256, 2 + 16 + 256, 12_500)
    assert [model.levels_below(nodes) for nodes in sizes] == [0, 1, 1, 2, 2, 3, 4]
    few = dataclasses.replace(MACHINE, gpus=4 * 32)  # 32 nodes: the store gives them to each
    assert model.wire_up_s(few) == pytest.approx(0.25 + 1e-4 * 128 + 32 * 32 * 1000 / 1e9 + 1e-5 * 32)


def test_a_file_system_by_hand() -> None:
    pfs = FileSystem("by hand", write_Bps=100e9, read_Bps=200e9, client_Bps=2e9, creates_per_s=10_000.0)
    # All: 1024 GB at 100 GB/s; a node alone: 4 GB at 2 GB/s; 1024 files.
    assert model.pfs_committed_s(MACHINE, pfs) == pytest.approx(0.1 + 10.24 + 0.1024)
    assert model.pfs_restored_s(MACHINE, pfs) == pytest.approx(5.12 + 0.1024 + 0.1)
    few = dataclasses.replace(MACHINE, gpus=8)
    assert model.pfs_committed_s(few, pfs) == pytest.approx(0.1 + 2.0 + 0.0008)  # the node is what limits


@pytest.mark.parametrize("text", SCHEMES)
def test_more_gpus_and_more_bytes_take_no_less(text: str) -> None:
    scheme = parse(text)
    for work in (model.committed_s, model.restored_s):
        sizes = [work(dataclasses.replace(MACHINE, gpus=gpus), scheme) for gpus in (64, 1024, 16_384, 131_072)]
        assert sizes == sorted(sizes)
        bytes_of = [work(dataclasses.replace(MACHINE, nbytes=nbytes), scheme) for nbytes in (0, 1e6, 1e9, 1e12)]
        assert bytes_of == sorted(bytes_of)


@pytest.mark.parametrize("text", SCHEMES)
def test_a_commit_takes_no_longer_with_a_faster_fabric(text: str) -> None:
    faster = dataclasses.replace(MACHINE, fabric=dataclasses.replace(FABRIC, beta_Bps=2 * FABRIC.beta_Bps))
    assert model.committed_s(faster, parse(text)) < model.committed_s(MACHINE, parse(text))


def test_no_bytes_leave_what_is_agreed_on() -> None:
    empty = dataclasses.replace(MACHINE, nbytes=0.0)
    for text in SCHEMES:
        assert model.committed_s(empty, parse(text)) == pytest.approx(2 * model.collective_s(empty, 1024))


def test_a_commit_of_large_states_is_bound_by_bytes_not_by_ranks() -> None:
    large = [model.committed_s(model.Machine(gpus, Node(), SLINGSHOT_11), parse("copy")) for gpus in (1000, 100_000)]
    assert large[1] / large[0] < 1.001


def test_what_is_sent_grows_with_losses() -> None:
    sent = [model.sent_per_byte(parse(text)) for text in ("none", "copy", "copy:2", "xor:8", "rs:6+2", "rs:8+3")]
    assert sent == pytest.approx([0, 1, 2, 1, 7 / 6, 10 / 8])


def test_waste_is_that_of_the_interval_module() -> None:
    machine = model.Machine(16_384, Node(), SLINGSHOT_11)
    commit, mtbf = model.pfs_committed_s(machine, PERLMUTTER), model.NODE_MTBF_S / machine.nodes
    recovery = model.RELAUNCH_S + model.pfs_restored_s(machine, PERLMUTTER)
    by_hand = 1 - 1 / inflation(daly(commit, mtbf), commit, recovery, mtbf)
    assert model.pfs_waste(machine, PERLMUTTER, waits=True) == pytest.approx(by_hand)


def test_waste_grows_with_failures_and_waiting_is_worst() -> None:
    for gpus in forecast.FEW:
        machine = model.Machine(gpus, Node(), SLINGSHOT_11)
        memory = model.memory_waste(machine, "copy", PERLMUTTER)
        behind, waits = (model.pfs_waste(machine, PERLMUTTER, wait) for wait in (False, True))
        assert 0 < memory < behind < waits < 1
        assert memory < model.memory_waste(machine, "copy", PERLMUTTER, model.NODE_MTBF_S / 2)


def at_100_000(**more: object) -> model.Machine:
    return model.Machine(100_000, Node(), SLINGSHOT_11, **more)  # type: ignore[arg-type]


def test_a_recovery_in_place_on_one_gpu_takes_what_was_measured() -> None:
    # docs/keep_alive.md: three ranks on an H100, DDP, a small model: 1.7 s from the kill, 0.1 to 0.2 of it new groups.
    few = model.Machine(3, Node(gpus=3), SLINGSHOT_11, nbytes=1e6)
    assert recoveries.in_place_s(few, node_lost=False) == pytest.approx(1.7, rel=0.15)
    assert recoveries.in_place_s(few, node_lost=False, noticed_s=2.0) == pytest.approx(3.7, rel=0.15)


def test_terms_are_all_of_a_recovery() -> None:
    for gpus in forecast.FEW:
        machine = model.Machine(gpus, Node(), SLINGSHOT_11)
        assert sum(recoveries.terms(machine).values()) == pytest.approx(recoveries.in_place_s(machine, node_lost=True))


def test_what_others_published_says_where() -> None:
    for one in recoveries.PUBLISHED:
        assert one.seconds > 0 and one.gpus > 0 and one.source and one.address.startswith("https://")


def test_two_sides_cross_where_they_are_equal() -> None:
    assert break_even.crossing(lambda x: x, lambda x: 10.0, 1, 1e6, grows=True) == pytest.approx(10)
    assert break_even.crossing(lambda x: 100 / x, lambda x: 10.0, 1, 1e6, grows=False) == pytest.approx(10)
    assert break_even.crossing(lambda x: 1.0, lambda x: 10.0, 1, 1e6, grows=True) is None
    assert break_even.crossing(lambda x: 11.0, lambda x: 10.0, 1, 1e6, grows=True) == math.inf
    with pytest.raises(ValueError, match="mlflash is slower at the upper end"):
        break_even.crossing(lambda x: x, lambda x: 10.0, 1, 1e6, grows=False)


def test_a_file_system_as_fast_as_memory_by_hand() -> None:
    # All but reading: 1024 files at 29,000 a second, 0.1 s to the GPU.
    left_s = model.restored_s(MACHINE, parse("copy")) - 1024 / 29_000 - 0.1
    assert break_even.read_Bps_of_a_gpu(MACHINE) == pytest.approx(1e9 / left_s)


@pytest.mark.parametrize("gpus", forecast.FEW)
def test_both_sides_take_equally_long_at_each_condition(gpus: int) -> None:
    machine, copy = model.Machine(gpus, Node(), SLINGSHOT_11), parse("copy")
    size = break_even.nbytes_of_a_gpu(machine, TECTONIC)
    assert size is not None and 0 < size < math.inf
    there = dataclasses.replace(machine, nbytes=size)
    assert model.restored_s(there, copy) == pytest.approx(model.pfs_restored_s(there, TECTONIC))
    less = dataclasses.replace(machine, nbytes=size / 2)
    assert model.restored_s(less, copy) > model.pfs_restored_s(less, TECTONIC)
    share = break_even.loaded(machine, PERLMUTTER, commits=True)
    assert share is not None
    slow = dataclasses.replace(machine, fabric=dataclasses.replace(SLINGSHOT_11, loaded=share))
    assert model.committed_s(slow, copy) == pytest.approx(model.pfs_committed_s(slow, PERLMUTTER))


def test_number_of_gpus_at_which_both_restore_equally_fast() -> None:
    for how in (WireUp("slow", 1000.0, rank_s=2e-3), WireUp("slow for each node", 1000.0, node_s=5e-3)):
        gpus = break_even.gpus_of_the_file_system(at_100_000(wire_up=how), PERLMUTTER)
        assert gpus is not None
        fewer, more = (dataclasses.replace(at_100_000(wire_up=how), gpus=int(gpus * by)) for by in (0.9, 1.1))
        assert model.restored_s(fewer, parse("copy")) < model.pfs_restored_s(fewer, PERLMUTTER)
        assert model.restored_s(more, parse("copy")) > model.pfs_restored_s(more, PERLMUTTER)


def test_number_of_gpus_at_which_agreement_outweighs_bytes_by_hand() -> None:
    # 3 us a rank; bytes: verified, fetched, verified, to the GPU: 0.5 s. All else is below a tenth of a second.
    gpus = break_even.gpus_where_ranks_count(MACHINE, (model.agreed_s,))
    assert gpus is not None and 0.4 / 3e-6 < gpus < 0.5 / 3e-6
    with_couriers = break_even.gpus_where_ranks_count(MACHINE, (model.agreed_s, model.wire_up_s))
    assert with_couriers is not None and with_couriers < 2000  # 0.25 s, and 0.1 ms a rank


def test_a_relaunch_that_is_as_fast_as_a_recovery_in_place() -> None:
    slow = at_100_000(wire_up=WireUp("slow", 1000.0, rank_s=2e-3))
    seconds = break_even.relaunch_s(slow, PERLMUTTER)
    assert seconds is not None
    in_place = recoveries.in_place_s(slow, node_lost=True)
    assert seconds + model.pfs_restored_s(at_100_000(), PERLMUTTER) == pytest.approx(in_place)


def test_every_condition_is_of_each_size_or_of_all() -> None:
    for one in break_even.conditions(Node()):
        assert set(one.at) in ({0}, set(forecast.FEW)) and all(value is None or value > 0 for value in one.at.values())


def test_more_ranks_make_no_more_communicators_and_a_few_hundred_bytes_of_tables_each() -> None:
    small, large = (counted.count(ranks, "copy", "rma") for ranks in (128, 1024))
    assert sorted(small.communicators.values()) == sorted(large.communicators.values()) == [1, 1, 1, 3]
    assert small.windows == large.windows == {2: 2}
    assert small.threads == large.threads == ("mlflash-courier", "mlflash-deadline")
    assert 8 < (large.tables_nbytes - small.tables_nbytes) / (1024 - 128) < 1000


def test_growth_is_a_line_through_medians() -> None:
    line = memory_of_ranks.fit([(4, 108.0), (8, 116.0), (16, 132.0)])
    assert (line.at_none, line.of_a_rank, line.at(1024)) == pytest.approx((100, 2, 2148))


@pytest.mark.parametrize("job", agreement.JOBS, ids=lambda job: "-".join(map(str, job)))
def test_simulated_ranks_commit_and_restore(job: tuple[str, str, bool]) -> None:
    rows = [agreement.measure(ranks, *job) for ranks in (128, 1024)]
    for row in rows:
        assert row is not None and not row.wrong
        assert row.allreduces == 2 and row.allreduces + row.of_sharers <= agreement.ALLREDUCES
    small, large = rows
    assert small is not None and large is not None
    assert (small.messages, small.allreduce_nbytes) == (large.messages, large.allreduce_nbytes)
