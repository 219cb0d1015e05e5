"""Each block of docs/pytorch.md: killed with a node lost, it ends with the bits of a run that nothing happened to."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import UID, Cluster, Result, own_memory

PAGE = (Path(__file__).parents[2] / "docs" / "pytorch.md").read_text()
# What each section is called here; a block that is about a mesh of several dimensions takes four ranks.
NAMES = {
    "DDP": "ddp",
    "FSDP2": "fsdp2",
    "Data with a position that all ranks share": "order",
    "Data with a position for each file": "files",
    "Accumulation, compile, AMP, EMA, a schedule": "all-in-one",
    "HSDP": "hsdp",
    "Tensor parallelism": "tp",
}
ON_FOUR = ["hsdp", "tp"]
ON_TWO = [name for name in NAMES.values() if name not in ON_FOUR]
STOP, LAST = 12, 20
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # the first test of a module waits for all launches


@dataclasses.dataclass
class Trained:
    """What all blocks for so many ranks have come to.

    Attributes:
        records: of all launches.
        left: memory as the killed jobs left it, without that of the rank that was killed.
    """

    records: list[dict[str, Any]]
    left: Path

    def of(self, event: str, case: str) -> dict[int, dict[str, Any]]:
        """The records of a block, by rank; of a run that nothing happened to, where it is ``whole-...``."""
        return {r["rank"]: r for r in self.records if r["event"] == event and r["case"] == case}


def scripts(folder: Path) -> dict[str, Path]:
    """The blocks of the page as files, by the names above."""
    found = {}
    for section in PAGE.split("\n## ")[1:]:
        for block in re.findall(r"^```python\n(.*?)^```", section, re.M | re.S):
            name = NAMES[section.partition("\n")[0]]
            assert name not in found, "a section has one block"
            found[name] = folder / f"{name}.py"
            found[name].write_text(block)
    assert found.keys() == {*NAMES.values()}
    return found


def task(script: Path, job: str, stop: int | None = None) -> dict[str, Any]:
    return {"script": str(script), "job": job, "stop": stop}


def launch(cluster: Cluster, ranks: int, tasks: list[dict[str, Any]]) -> Result:
    """Run blocks one after the other; where the last one stops, a rank is killed there."""
    env = {"PYTHONWARNINGS": "ignore"}  # torch's own
    job = cluster.start(ranks, "programs/page_job.py", json.dumps(tasks), env=env)
    if tasks[-1]["stop"] is not None:
        job.wait_for("middle", 1)
        job.signal([ranks - 1])
    result = job.wait()
    assert (result.returncode == 0) is (tasks[-1]["stop"] is None), result.log
    return result


def trained(root: Path, ranks: int, names: list[str]) -> Trained:
    """Run each block whole, then killed and again: as few launches as can be, as each takes seconds to import torch."""
    made, cluster = scripts(root), Cluster(root, job="page")
    left = root / "left"
    records = []
    tasks = [task(made[name], f"whole-{name}") for name in names]
    for name in names:
        records += launch(cluster, ranks, [*tasks, task(made[name], name, STOP)]).records
        Cluster(root, job=name).wipe(ranks - 1)  # its node is lost
        for held in root.glob(f"node*/mlflash-{UID}/{name}"):
            copy = left / held.relative_to(root)
            copy.parent.mkdir(0o700, parents=True, exist_ok=True)
            shutil.copytree(held, copy)
        tasks = [task(made[name], name)]
    records += launch(cluster, ranks, tasks).records
    return Trained(records, left)


@pytest.fixture(scope="module")
def on_two() -> Iterator[Trained]:
    with own_memory() as root:
        yield trained(root, 2, ON_TWO)


@pytest.fixture(scope="module")
def on_four() -> Iterator[Trained]:
    with own_memory() as root:
        yield trained(root, 4, ON_FOUR)


@pytest.mark.parametrize("name", [*ON_TWO, *ON_FOUR])
def test_a_loop_of_plain_pytorch_goes_on_with_the_same_bits(name: str, request: pytest.FixtureRequest) -> None:
    ranks, its = (4, "on_four") if name in ON_FOUR else (2, "on_two")
    found: Trained = request.getfixturevalue(its)
    whole, again = found.of("ended", f"whole-{name}"), found.of("ended", name)
    assert whole.keys() == again.keys() == {*range(ranks)}
    assert {(r["first"], r["last"]) for r in whole.values()} == {(1, LAST)}
    (first,) = {r["first"] for r in again.values()}
    assert 1 < first <= STOP, "it went on from a checkpoint"
    for rank in whole:
        assert again[rank]["left"] == whole[rank]["left"], rank


@pytest.fixture(scope="module")
def then_on_three(on_two: Trained) -> Trained:
    """The blocks about data, which were killed on two ranks."""
    cluster, root = Cluster(on_two.left, job="page"), on_two.left.parent
    tasks = [task(root / f"{name}.py", name) for name in ("order", "files")]
    return Trained(launch(cluster, 3, tasks).records, on_two.left)


def read(found: Trained, case: str, first: int, last: int) -> dict[int, list[Any]]:
    """The samples that all ranks together have trained on, by step."""
    steps: dict[int, list[Any]] = {step: [] for step in range(first, last + 1)}
    for r in found.records:
        if r["event"] == "step" and r["case"] == case and first <= r["step"] <= last:
            steps[r["step"]] += r["x"]
    return {step: sorted(rows) for step, rows in steps.items()}


def weights(found: Trained, case: str, step: int) -> set[str]:
    return {json.dumps(r["weights"]) for r in found.records
            if r["event"] == "step" and r["case"] == case and r["step"] == step}  # fmt: skip


@pytest.mark.parametrize("name", ["order", "files"])
def test_positions_in_data_go_on_on_another_number_of_ranks(name: str, on_two: Trained, then_on_three: Trained) -> None:
    ended = then_on_three.of("ended", name)
    assert len(ended) == 3
    (first,) = {r["first"] for r in ended.values()}
    assert 1 < first <= STOP
    assert weights(then_on_three, name, first) == weights(on_two, f"whole-{name}", first)
    assert len(weights(then_on_three, name, first)) == 1
    whole, on_three = read(on_two, f"whole-{name}", 1, LAST), read(then_on_three, name, first, LAST)
    assert on_three == {step: whole[step] for step in range(first, LAST + 1)}
    if name == "files":  # each line once
        rows = sorted(tuple(row) for rows in whole.values() for row in rows)
        assert len(rows) == len({*rows}) == 6 * 40
