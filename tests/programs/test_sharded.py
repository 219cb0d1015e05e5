"""Models and optimizers in shards, with a plain Checkpointer and nothing else: in new processes they go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import Cluster, Result

pytestmark = pytest.mark.slow


def ran(cluster: Cluster, what: str) -> Result:
    result = cluster.run(4, "programs/sharded_job.py", what, env={"PYTHONWARNINGS": "ignore"})  # torch's own
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
