"""Any state is refused by its path on all ranks, or a new process gets it back, type for type and bit for bit."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
from harness import Cluster, Result
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from states import EXAMPLES, Spec, changed, specs

RANKS, STEPS = 2, 2  # memory keeps two steps of a job
SEED = int(os.environ.get("MLFLASH_TEST_SEED") or 1)


def drawn(number: int) -> list[list[list[Spec]]]:
    """Examples: of each job the steps, of each step the descriptions of its ranks; some jobs save nearly the same."""
    made: list[list[list[Spec]]] = []

    @seed(SEED)
    @settings(max_examples=-(-number // STEPS), database=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(specs(), specs(), st.booleans(), st.booleans(), st.integers(0, 99))
    def draw(first: Spec, second: Spec, are_alike: bool, is_like_before: bool, by: int) -> None:
        ranks = [first, first if are_alike else second]
        later = [changed(spec, by) for spec in ranks] if is_like_before else [second, first]
        made.append([ranks, later])

    draw()
    return made


@pytest.mark.timeout(120 + EXAMPLES)
def test_any_state_is_refused_on_all_ranks_or_read_by_a_new_process_bit_for_bit(shm: Path) -> None:
    examples = drawn(EXAMPLES or 200)
    described = shm / "examples"
    described.write_bytes(pickle.dumps(examples))
    cluster = Cluster(shm)

    def ran(what: str) -> Result:
        result = cluster.run(RANKS, "programs/states_worker.py", what, str(described), timeout=100.0 + EXAMPLES)
        at = max((r["job"] for r in result.records if "job" in r), default=0)
        assert result.returncode == 0 and len(result.of("end")) == RANKS, f"{told(at, 1)}\n{result.log}"
        return result

    def told(job: int, step: int) -> str:
        again = f"MLFLASH_TEST_SEED={SEED} MLFLASH_TEST_EXAMPLES={EXAMPLES or 200}"
        return f"{again}: job {job}\n{examples[job]}\nstep {step}"

    refused: set[tuple[int, int]] = set()
    for record in ran("save").of("saved"):
        assert not record["wrong"], f"{told(record['job'], record['step'])}\n{record}"
        if record["refused"]:
            refused.add((record["job"], record["step"]))
    every = {(job, step) for job, steps in enumerate(examples) for step in range(1, len(steps) + 1)}
    assert len(refused) < len(every) / 2, "most states are of what can be saved"
    found = ran("read").of("read")
    for record in found:
        assert not record["wrong"], f"{told(record['job'], record['step'])}\n{record['wrong']}"
    for rank in range(RANKS):
        read = {(r["job"], r["step"]) for r in found if r["rank"] == rank}
        assert read == every - refused, f"{told(*min(read ^ (every - refused)))} is there on one side only"
