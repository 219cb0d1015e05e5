"""Slots that are damaged, swapped or replayed while no job runs: found, and made again from their copies."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from damage import flip, headers
from harness import Cluster, assert_unrestorable, train_and_die

from mlflash.memory.slot import HEADER_NBYTES, unpack


def slots_of(cluster: Cluster, rank: int, step: int, nodes: list[int]) -> list[Path]:
    """The files that hold a rank's state of a step on some nodes."""
    return [path for node in nodes for path, header in headers(cluster.node(node))
            if (header.rank, header.step) == (rank, step)]  # fmt: skip


def damage(cluster: Cluster, rank: int, step: int, nodes: list[int], place: str, bit: int = 1) -> None:
    """Damage a rank's slots of a step on some nodes."""
    files = slots_of(cluster, rank, step, nodes)
    assert len(files) == len(nodes)
    for file in files:
        extents = unpack(file.read_bytes()[:HEADER_NBYTES]).extents
        at = {"header": 40, "manifest": 4100, "payload": extents.payload_start + 1000,
              "table": extents.table_start + 3}.get(place, 0)  # fmt: skip
        if place == "truncated":
            os.truncate(file, 8192)
        elif place == "zeroed":
            np.memmap(file, mode="r+")[extents.payload_start : extents.payload_start + 65_536] = 0
        elif place in ("old header", "old file"):
            (older,) = [path.read_bytes() for path, header in headers(file.parent)
                        if (header.rank, header.step) == (rank, step - 1)]  # fmt: skip
            with file.open("r+b") as slot:
                slot.write(older[: 4096 if place == "old header" else file.stat().st_size])
        else:
            flip(file, at, bit=bit)


# Each place is damaged in one of the first two tests. "old header" and "old file" are those of the step before, whole
# and valid in themselves: of one save there are none.
@pytest.mark.parametrize(("place", "step"), [("header", 1), ("old file", 3)])
def test_a_damaged_slot_and_a_damaged_copy_are_made_again(shm: Path, place: str, step: int) -> None:
    cluster = Cluster(shm)
    train_and_die(cluster, 2, step)
    damage(cluster, 1, step, [1], place)
    result = cluster.train(2, last=0)
    assert [(r["step"], r["wrong"]) for r in result.of("restored")] == [(step, [])] * 2, result.log
    assert [r["report"]["counts"].get("slots fetched", 0) for r in result.of("restored")] == [0, 1]
    result = cluster.train(2, last=0)
    assert [(r["step"], r["wrong"]) for r in result.of("restored")] == [(step, [])] * 2, result.log
    # A copy goes bad: the reprotection makes it again, saving goes on, and the node of its owner may be lost.
    damage(cluster, 1, step, [0], place, bit=4)
    result = cluster.train(2, last=0)
    assert [r["report"]["counts"].get("slots reprotected", 0) for r in result.of("end")] == [0, 1], result.log
    cluster.wipe(1)
    result = cluster.train(2, last=step + 3)
    assert [(r["step"], r["wrong"]) for r in result.of("restored")] == [(step, [])] * 2, result.log
    assert [r["steps"] for r in result.of("end")] == [[step + 2, step + 3]] * 2, result.log


@pytest.mark.parametrize("place", ["manifest", "payload", "table", "truncated", "zeroed", "old header"])
def test_where_slot_and_copy_are_both_damaged_the_step_is_not_restored(shm: Path, place: str) -> None:
    cluster = Cluster(shm)
    train_and_die(cluster, 2, 3)
    damage(cluster, 1, 3, [0, 1], place)
    result = cluster.train(2, last=5)
    assert [(r["step"], r["wrong"]) for r in result.of("restored")] == [(2, [])] * 2, result.log
    assert [r["steps"] for r in result.of("end")] == [[4, 5]] * 2


@pytest.mark.parametrize("place", ["header", "payload", "truncated"])
def test_damage_of_the_only_step_is_told_and_nothing_touched(shm: Path, place: str) -> None:
    cluster = Cluster(shm)
    train_and_die(cluster, 2, 1)
    damage(cluster, 1, 1, [0, 1], place)
    before = {path: path.read_bytes() for path in cluster.slot_files()}
    how = {"header": "the header of this slot is damaged", "payload": r"1 of \d+ blocks of slot-\d+ are damaged",
           "truncated": "it has 8,192 bytes of"}[place]  # fmt: skip
    result = cluster.train(2, last=3)
    assert_unrestorable(result, 2, step_1=rf"slot-\d+ on node0: {how}.*; slot-\d+ on node1: {how}")
    assert {path: path.read_bytes() for path in cluster.slot_files()} == before


@pytest.mark.parametrize("part", ["file", "body"])
def test_slots_of_two_ranks_that_were_exchanged_are_not_mixed_up(shm: Path, part: str) -> None:
    cluster = Cluster(shm)
    train_and_die(cluster, 2, 3, nbytes=300_000)
    first, second = (slots_of(cluster, rank, 3, [rank])[0] for rank in (0, 1))
    a, b = first.read_bytes(), second.read_bytes()
    keep = 0 if part == "file" else 4096  # each with its own header, on the body of the other
    first.write_bytes(a[:keep] + b[keep:])
    second.write_bytes(b[:keep] + a[keep:])
    result = cluster.train(2, last=5)
    assert [(r["step"], r["wrong"]) for r in result.of("restored")] == [(3, [])] * 2, result.log
    assert [r["report"]["counts"].get("slots fetched", 0) for r in result.of("restored")] == [1, 1]
    for lost in (0, 1):
        cluster.wipe(lost)
        result = cluster.train(2, last=0)
        assert [(r["step"], r["wrong"]) for r in result.of("restored")] == [(5, [])] * 2, result.log
