"""Models and optimizers in shards, with a plain Checkpointer and nothing else: in new processes they go on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import Cluster, Result

from mlflash.launcher.processes import mpiexec

REPO = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def ran(cluster: Cluster, what: str) -> Result:
    result = cluster.run(4, "sharded_job.py", what, env={"PYTHONWARNINGS": "ignore"})  # torch's own
    assert result.returncode == 0, result.log
    return result


def by_case(result: Result, event: str) -> dict[tuple[str, int], dict[str, Any]]:
    return {(r["case"], r["rank"]): {"losses": r.get("losses"), "tensors": r["tensors"]} for r in result.of(event)}


def test_an_optimizer_without_state_gets_it_as_its_parameters_are_and_goes_on_with_the_same_bits(shm: Path) -> None:
    cluster = Cluster(shm, ranks_per_node=4)
    saved = ran(cluster, "save")
    expected = by_case(saved, "ended")
    restored = ran(cluster, "restore")
    found = by_case(restored, "ended")
    assert found.keys() == expected.keys() and len({case for case, _ in found}) >= 12
    for case, ended in expected.items():
        assert found[case] == ended, case
    # On other ranks each tensor has the bits it had; what cannot be cut anew is refused, and it says what to do.
    refused = {r["case"]: r["why"] for r in restored.of("refused")}
    assert set(refused) == {"fsdp1-adamw", "fsdp1-flat-adamw"}
    assert all("fully_shard" in why for why in refused.values()), refused
    before = by_case(saved, "half")
    on_two = by_case(restored, "half")
    assert len(on_two) == 2 * (len(found) // 4 - len(refused))
    for case, tensors in on_two.items():
        assert tensors == before[case], case


def test_the_recipe_of_the_docs_for_fsdp2_goes_on_when_it_is_started_again(shm: Path, tmp_path: Path) -> None:
    page = (REPO / "docs" / "using.md").read_text()
    (block,) = [one for one in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if "fully_shard" in one]
    (tmp_path / "train.py").write_text(block)
    for first in (1, 4):
        settings = {"MLFLASH_MEMORY": str(shm), "TMPDIR": str(tmp_path)}
        command, environment = mpiexec(2, [sys.executable, "-m", "mpi4py", "train.py"], {**os.environ, **settings})
        done = subprocess.run(command, env=environment, cwd=tmp_path, timeout=100, capture_output=True, text=True,
                              check=False)  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert sorted(done.stdout.splitlines()) == [f"rank {rank}: steps {first} to {first + 2}" for rank in (0, 1)]
