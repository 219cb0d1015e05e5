"""Copies and parity on a disk of each node: what a restore finds after nodes, disks and all memory are lost."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import holds
import numpy as np
import pytest
from damage import flip, headers
from emulated import Nodes
from mpi4py import MPI
from on_node import disk_of
from states import differences
from waiting import until

from mlflash import Checkpointer
from mlflash.errors import ConfigError, Unrestorable

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
SCHEMES = ["copy"] + (["xor:3"] if SIZE == 3 else ["copy:2", "rs:2+2"] if SIZE == 4 else [])
pytestmark = pytest.mark.mpi(min_size=2)


def state_at(step: int) -> dict[str, Any]:
    """Slots of different sizes, in blocks of 64 KiB: two runs of blocks and more, and the last block is short."""
    numbers = np.random.default_rng((RANK, step))
    return {"w": numbers.standard_normal(60_000 + 9_001 * RANK), "step": step, "b": numbers.integers(0, 99, 5)}


@pytest.fixture(autouse=True)
def nothing_is_held() -> Iterator[None]:
    yield
    holds.let_go()


@pytest.fixture(params=SCHEMES)
def settings(request: pytest.FixtureRequest, options: dict[str, Any], root: Path) -> dict[str, Any]:
    return {**options, "copies": disk_of(RANK, root), "redundancy": request.param, "strict": True}


def save(settings: dict[str, Any], *steps: int) -> None:
    with Checkpointer(**settings) as ckpt:
        for step in steps:
            ckpt.save(step, state_at(step)).wait()


def check_restored(settings: dict[str, Any], step: int) -> None:
    """Restore, compare, and save once more, so that all is protected again."""
    with Checkpointer(**settings) as ckpt:
        found, state = ckpt.load()
        assert found == step and differences(state_at(step), state, "", loaded=True) == []
        ckpt.save(step + 1, state_at(step + 1)).wait()
    with Checkpointer(**settings) as ckpt:
        assert ckpt.load()[0] == step + 1


def lose_memory(nodes: Nodes, *of: int) -> None:
    nodes.on_rank_0(lambda: [shutil.rmtree(nodes.path(node)) for node in of])


def lose_disk(nodes: Nodes, *of: int) -> None:
    nodes.on_rank_0(lambda: [shutil.rmtree(path) for node in of for path in (nodes.root / f"disk{node}").iterdir()])


def test_memory_has_only_own_slots_and_the_disk_what_protects_others(settings: dict[str, Any], nodes: Nodes) -> None:
    with Checkpointer(**settings) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state_at(step)).wait()
        slots = ckpt.report()["slots"]
        assert ckpt.report()["transport"] == "p2p"
    disk = Path(settings["copies"])
    others = 2 if settings["redundancy"] == "copy:2" and SIZE > 2 else 1
    assert [slot["file"] >= "slot-1000000" for slot in slots] == [False] * 2 + [True] * 2 * others
    assert [header.rank for _, header in headers(nodes.path(RANK))] == [RANK] * 2
    on_disk = [*headers(disk)]
    assert sorted(header.step for _, header in on_disk) == [2] * others + [3] * others
    for path, header in on_disk:
        assert path.stat().st_size == header.extents.nbytes


def test_a_lost_node_comes_back_from_the_disks_of_others(settings: dict[str, Any], nodes: Nodes) -> None:
    save(settings, 1, 2)
    for node in range(SIZE):
        nodes.lose(node)
        lose_disk(nodes, node)
        check_restored(settings, 2 + node)


@pytest.mark.parametrize("settings", [scheme for scheme in SCHEMES if scheme.startswith("copy")], indirect=True)
def test_after_a_power_cut_of_all_nodes_the_newest_step_comes_back_from_the_disks(
    settings: dict[str, Any], nodes: Nodes
) -> None:
    save(settings, 1, 2)
    lose_memory(nodes, *range(SIZE))
    check_restored(settings, 2)


@pytest.mark.parametrize("settings", ["copy"], indirect=True)  # of two copies the other one would be taken
def test_what_is_damaged_on_a_disk_is_not_restored(settings: dict[str, Any], nodes: Nodes) -> None:
    save(settings, 1, 2)
    lose_memory(nodes, *range(SIZE))

    def damage(step: int, place: Callable[[Any], int]) -> None:
        path, header = next(file for file in headers(nodes.root / "disk0") if file[1].step == step)
        flip(path, place(header))

    nodes.on_rank_0(lambda: damage(2, lambda header: header.extents.payload_start))
    with Checkpointer(**settings) as ckpt:
        assert ckpt.load()[0] == 1
    nodes.on_rank_0(lambda: damage(1, lambda header: header.extents.table_start))
    lose_memory(nodes, *range(SIZE))
    with Checkpointer(**settings) as ckpt, pytest.raises(Unrestorable):
        ckpt.load()


def test_damage_at_rest_on_a_disk_is_found_and_made_again(settings: dict[str, Any], nodes: Nodes) -> None:
    with Checkpointer(**settings, scrub_rate=1e9) as ckpt:
        ckpt.save(1, state_at(1)).wait()
        nodes.on_rank_0(lambda: flip(next(headers(nodes.root / "disk0"))[0], 5000))
        until(lambda: COMM.allreduce(ckpt.report()["counts"].get("files damaged", 0)), "the damage to be found")
        ckpt.save(2, state_at(2)).wait()
        assert COMM.allreduce(ckpt.report()["counts"].get("files made again", 0)) == 1


@pytest.mark.parametrize(
    "number", [errno.ENOSPC, *(pytest.param(n, marks=pytest.mark.slow) for n in (errno.EIO, errno.EROFS))]
)
def test_if_the_disk_of_a_node_fails_its_copies_are_in_memory(
    settings: dict[str, Any], nodes: Nodes, replace: Callable[[str], None], number: int
) -> None:
    replace("disk_fails")
    with Checkpointer(**{**settings, "strict": False}) as ckpt:
        ckpt.save(1, state_at(1)).wait()
        if RANK == 0:
            holds.at("disk", str(number))
        COMM.Barrier()
        failed = ckpt.save(2, state_at(2))
        ckpt.wait()
        assert "did not arrive whole" in str(failed.error)
        for step in (3, 4, 5):
            assert ckpt.save(step, state_at(step)).wait().committed
    nodes.lose(1)
    check_restored(settings, 5)


def test_a_disk_that_is_not_there_is_said_and_copies_are_in_memory(
    settings: dict[str, Any], nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    if RANK == 0:
        shutil.rmtree(settings["copies"])
    COMM.Barrier()
    save(settings, 1, 2)
    nodes.lose(1)
    check_restored(settings, 2)


def test_a_directory_that_nodes_have_together_is_refused(settings: dict[str, Any], root: Path) -> None:
    with pytest.raises(ConfigError, match="a disk of each node"):
        Checkpointer(**{**settings, "copies": disk_of(0, root)})
    with Checkpointer(**settings) as ckpt:
        assert ckpt.load() == (None, None)


def test_steps_that_are_kept_are_whole_on_the_disks(settings: dict[str, Any], nodes: Nodes) -> None:
    settings |= {"history": 2}
    save(settings, 1, 2, 3, 4)
    lose_memory(nodes, *range(SIZE))
    lose_disk(nodes, 1)  # as well: any node may be missing after a power cut
    with Checkpointer(**settings) as ckpt:
        assert ckpt.steps()[-3:] == [2, 3, 4]
        for wanted, step in (({"before": 4}, 3), ({"step": 2}, 2), ({}, 4)):
            found, state = ckpt.load(**wanted)
            assert found == step and differences(state_at(step), state, "", loaded=True) == []
        ckpt.save(5, state_at(5)).wait()
        assert ckpt.steps()[-3:] == [3, 4, 5]
        slots = ckpt.report()["slots"]
    assert sum(slot["file"] < "slot-1000000" and slot["what"] == "own" for slot in slots) == 2
    save(settings, 6)
    lose_memory(nodes, *range(SIZE))
    check_restored(settings, 6)


def test_one_step_in_so_many_seconds_is_kept(settings: dict[str, Any], nodes: Nodes) -> None:
    settings |= {"history": 1, "history_every_s": 3600.0}
    save(settings, 1, 2, 3, 4, 5)
    with Checkpointer(**settings) as ckpt:
        assert 1 in ckpt.steps() and 5 in ckpt.steps()
        assert ckpt.load(step=1)[0] == 1
    lose_memory(nodes, *range(SIZE))
    with Checkpointer(**settings) as ckpt:
        found, state = ckpt.load(step=1)
        assert found == 1 and differences(state_at(1), state, "", loaded=True) == []


def test_what_ranks_hold_alike_is_kept_on_the_disks(settings: dict[str, Any], nodes: Nodes) -> None:
    settings |= {"history": 1, "redundancy": "copy"}
    alike = {"w": np.arange(100_000.0), "own": np.full(70_000, float(RANK))}
    with Checkpointer(**settings, replicated={"w": range(SIZE)}) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"w": alike["w"] + step, "own": alike["own"] + step}).wait()
    lose_memory(nodes, *range(SIZE))
    with Checkpointer(**settings, replicated={"w": range(SIZE)}) as ckpt:
        for step in (2, 1):
            found, state = ckpt.load(step=step)
            assert found == step and all(np.array_equal(state[name], alike[name] + step) for name in alike)


@pytest.mark.parametrize("number", [errno.ENOSPC, pytest.param(errno.EIO, marks=pytest.mark.slow)])
def test_a_disk_that_fails_ends_the_history_and_no_save_after_that(
    settings: dict[str, Any], nodes: Nodes, replace: Callable[[str], None], number: int
) -> None:
    settings |= {"history": 1, "strict": False}
    replace("disk_fails")
    with Checkpointer(**settings) as ckpt:
        ckpt.save(1, state_at(1)).wait()
        if RANK == 0:
            holds.at("disk", str(number))
        COMM.barrier()
        ckpt.save(2, state_at(2))
        ckpt.wait()
        for step in (3, 4, 5):
            assert ckpt.save(step, state_at(step)).wait().committed
    nodes.lose(1)
    check_restored(settings, 5)


@pytest.mark.parametrize("alike", [False, True])
def test_drains_read_the_disk_and_take_no_slot_in_memory(settings: dict[str, Any], root: Path, alike: bool) -> None:
    settings |= {"history": 1, "directory": root / "pfs", "drain_every": 1, "redundancy": "copy"}
    replicated = {"w": range(SIZE)} if alike else None

    def state(step: int) -> dict[str, Any]:
        return state_at(step) | ({"w": np.arange(100_000.0) + step} if alike else {})

    with Checkpointer(**settings, replicated=replicated) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state(step)).wait()
            ckpt.wait_drained()
        slots = ckpt.report()["slots"]
    assert sum(slot["what"] == "own" for slot in slots) == 2
    assert sum(slot["what"] == "kept" for slot in slots) <= 4 * (1 + alike)
    with Checkpointer(**{**settings, "job": "another"}) as ckpt:  # it finds nothing in memory
        for wanted in (3, 2):
            found, got = ckpt.load(step=wanted)
            assert found == wanted and differences(state(wanted), got, "", loaded=True) == []
