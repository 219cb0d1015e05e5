"""The pages of docs/, as they stand: their Python blocks, and the commands of the quickstart.

The blocks of other pages are whole trainings, which are killed: frameworks/test_docs.py, test_launchers.py.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import UID, Cluster, Result, own_memory
from processes import ran

REPO = Path(__file__).parents[2]
DOCS = REPO / "docs"
TRAININGS = {"lightning", "transformers", "deepspeed", "torchtitan", "nemo", "quickstart", "pytorch", "README", "fsdp"}
FIRST = {f"{page}-0" for page in ("using", "dcp", "drain", "keep_alive")}


def blocks_of(text: str, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}", marks=pytest.mark.gate if f"{page.stem}-{number}" in FIRST else ())
    for page in sorted(DOCS.glob("*.md"))
    if page.stem not in TRAININGS
    for number, block in enumerate(blocks_of(page.read_text()))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_the_block_runs(block: str, shm: Path) -> None:
    ran(sys.executable, "-W", "error", "-c", block, cwd=shm, timeout=100, MLFLASH_MEMORY=shm, OMP_NUM_THREADS=1)


@pytest.mark.parametrize("block", [block for block in BLOCKS if str(block.id).startswith("migrating")])
def test_who_comes_from_another_system_runs_it_twice(block: str, shm: Path) -> None:
    (shm / "program.py").write_text(block)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    for _ in range(2):
        ran(*torchrun, "program.py", cwd=shm, timeout=150, MLFLASH_MEMORY=shm, OMP_NUM_THREADS=1)


# docs/quickstart.md

QUICKSTART = (DOCS / "quickstart.md").read_text()


def section(title: str) -> str:
    return QUICKSTART.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def commands(title: str) -> list[str]:
    return [line for block in blocks_of(section(title), "sh") for line in block.splitlines()]


def test_on_a_laptop_it_is_killed_loses_a_node_and_goes_on(shm: Path, tmp_path: Path) -> None:
    (block,) = blocks_of(section("A training job"))
    (tmp_path / "train.py").write_text(block)
    lines = commands("On a laptop")
    typed = [line for line in (*commands("Install"), *lines) if not line.startswith("#")]
    assert len(typed) == 15, "as the page says"
    assert sum("/dev/shm" in line for line in lines) == 2
    script = "\n".join(["set -ex", *lines]).replace("/dev/shm", str(shm))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    printed = ran("bash", "-c", script, cwd=tmp_path, timeout=110, PATH=path, MLFLASH_MEMORY=shm, OMP_NUM_THREADS=1)
    out = printed.stdout
    begins = [int(step) for step in re.findall(r"begins after step (\d+)", out)]
    (left, again) = re.findall(r"in memory: step (\d+) of 4 ranks", out)
    assert begins == [int(left)] and left == again and int(left) >= 55, out
    assert "survives the loss of: any process; any 1 of 4 nodes" in out and "step 300" in out
    assert "quickstart: " in out and "freed" in out and not list(shm.glob("node*/mlflash-*/quickstart"))
    assert "begins after step 0" in (tmp_path / "first.log").read_text()


@pytest.mark.gate
def test_each_page_that_installs_has_the_one_command() -> None:
    (install, *_) = re.findall(r"^pip install .*", (DOCS / "install.md").read_text(), re.M)
    assert commands("Install")[-1] == install and install in (REPO / "README.md").read_text()
    pages = [page for page in DOCS.glob("*.md") if page.stem not in ("install", "quickstart")]
    assert not [page.name for page in pages if re.search(r"pip install [^\n]*(mlflash|'\.)", page.read_text())]


# docs/pytorch.md: each block is killed, and ends with the bits of a run that nothing happened to

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
    files = {}
    for part in (DOCS / "pytorch.md").read_text().split("\n## ")[1:]:
        for block in blocks_of(part):
            name = NAMES[part.partition("\n")[0]]
            assert name not in files, "a section has one block"
            files[name] = folder / f"{name}.py"
            files[name].write_text(block)
    assert files.keys() == {*NAMES.values()}
    return files


def task(script: Path, job: str, stop: int | None = None) -> dict[str, Any]:
    return {"script": str(script), "job": job, "stop": stop}


def launch(cluster: Cluster, ranks: int, tasks: list[dict[str, Any]]) -> Result:
    """Run blocks one after the other; where the last one stops, a rank is killed there."""
    job = cluster.start(ranks, "programs/page_job.py", json.dumps(tasks), env={"PYTHONWARNINGS": "ignore"})
    if tasks[-1]["stop"] is not None:
        job.wait_for("middle", 1)
        job.signal([ranks - 1])
    result = job.wait()
    assert (result.returncode == 0) is (tasks[-1]["stop"] is None), result.log
    return result


def trained(root: Path, ranks: int, names: list[str]) -> Trained:
    """Run each block whole, then killed and again: as few launches as can be, as each takes seconds to import torch."""
    files, cluster, left = scripts(root), Cluster(root, job="page"), root / "left"
    records = []
    tasks = [task(files[name], f"whole-{name}") for name in names]
    for name in names:
        records += launch(cluster, ranks, [*tasks, task(files[name], name, STOP)]).records
        Cluster(root, job=name).wipe(ranks - 1)  # its node is lost
        for held in root.glob(f"node*/mlflash-{UID}/{name}"):
            copy = left / held.relative_to(root)
            copy.parent.mkdir(0o700, parents=True, exist_ok=True)
            shutil.copytree(held, copy)
        tasks = [task(files[name], name)]
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


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [*ON_TWO, *ON_FOUR])
def test_a_loop_of_plain_pytorch_goes_on_with_the_same_bits(name: str, request: pytest.FixtureRequest) -> None:
    ranks, fixture = (4, "on_four") if name in ON_FOUR else (2, "on_two")
    blocks: Trained = request.getfixturevalue(fixture)
    whole, again = blocks.of("ended", f"whole-{name}"), blocks.of("ended", name)
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


def steps_of(blocks: Trained, case: str) -> list[dict[str, Any]]:
    return [r for r in blocks.records if r["event"] == "step" and r["case"] == case]


def samples(blocks: Trained, case: str, first: int) -> dict[int, list[Any]]:
    """The samples that all ranks together have trained on, by step, from the first one on."""
    records = [r for r in steps_of(blocks, case) if first <= r["step"] <= LAST]
    return {step: sorted(x for r in records if r["step"] == step for x in r["x"]) for step in range(first, LAST + 1)}


def weights(blocks: Trained, case: str, step: int) -> set[str]:
    return {json.dumps(r["weights"]) for r in steps_of(blocks, case) if r["step"] == step}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["order", "files"])
def test_positions_in_data_go_on_on_another_number_of_ranks(name: str, on_two: Trained, then_on_three: Trained) -> None:
    ended = then_on_three.of("ended", name)
    assert len(ended) == 3
    (first,) = {r["first"] for r in ended.values()}
    assert 1 < first <= STOP
    assert weights(then_on_three, name, first) == weights(on_two, f"whole-{name}", first)
    assert len(weights(then_on_three, name, first)) == 1
    whole, on_three = samples(on_two, f"whole-{name}", 1), samples(then_on_three, name, first)
    assert on_three == {step: whole[step] for step in range(first, LAST + 1)}
    if name == "files":  # each line once
        rows = sorted(tuple(row) for rows in whole.values() for row in rows)
        assert len(rows) == len({*rows}) == 6 * 40
