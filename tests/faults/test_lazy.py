"""Training dies while its state is being copied behind `save`: what is restored is the state of a save, bit for bit.

test_each_point.py loses a node then. Here a trainer and a courier die alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import needs
import pytest
from harness import Cluster, Result, own_memory

LAST = 6
ENV = {"MLFLASH_TEST_BLOCK_NBYTES": "16384"}


def run(cluster: Cluster, **spec: Any) -> Result:
    return cluster.run(2, "faults/lazy_worker.py", json.dumps({"last": LAST, **spec}), env=ENV, timeout=90)


def saved(result: Result) -> dict[tuple[int, int], str]:
    """By rank and step."""
    return {(record["rank"], record["step"]): record["digest"] for record in result.of("saved")}


@pytest.fixture(scope="module")
def uninterrupted() -> Iterator[dict[int, str]]:
    """What each rank of a training has at its end that nobody disturbs."""
    with own_memory() as root:
        whole = run(Cluster(root, 1))
    assert len(whole.of("end")) == 2, whole.log
    yield {record["rank"]: record["digest"] for record in whole.of("end")}


@needs.PMI_1
def test_killed_while_it_copies_it_goes_on_from_a_save_with_the_same_bits(
    shm: Path, uninterrupted: dict[int, str]
) -> None:
    """A trainer dies alone."""
    cluster = Cluster(shm, 1)
    crashed = run(cluster, traps=[{"path": ["protect.announced"] * 4, "action": "trainer", "rank": 1}])
    assert not crashed.of("end"), crashed.log
    committed = max((record["step"] for record in crashed.of("committed")), default=0)
    assert committed, crashed.log
    result = run(cluster)
    (step,) = {record["step"] for record in result.of("restored")}
    assert committed <= step < LAST, crashed.log + result.log
    for record in result.of("restored"):
        assert record["digest"] == saved(crashed)[record["rank"], step], result.log
    assert {r["rank"]: r["digest"] for r in result.of("end")} == uninterrupted, result.log


@needs.PMI_1
def test_a_courier_killed_while_its_trainer_copies_costs_saves_and_nothing_else(
    shm: Path, uninterrupted: dict[int, str]
) -> None:
    cluster = Cluster(shm, 1)
    trap = {"path": ["stage.copied"] * 4, "action": "courier", "rank": 1}
    spec = {"last": LAST, "traps": [trap], "strict": False}
    job = cluster.start(2, "faults/lazy_worker.py", json.dumps(spec), env=ENV)
    result = job.wait()
    assert any(job.out.glob("sprung*")), result.log
    assert {r["rank"]: r["digest"] for r in result.of("end")} == uninterrupted, result.log
    newest = {record["steps"][-1] for record in result.of("end")}
    again = run(cluster)
    assert {record["step"] for record in again.of("restored")} == newest, result.log + again.log
    for record in again.of("restored"):
        assert record["digest"] == saved(result)[record["rank"], record["step"]], again.log
