"""Trainings of torch, torchdata and SMP, in shards and whole: restored in new processes, they go on bit for bit."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from harness import Cluster, Result
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from states import EXAMPLES, Spec, changed, specs
from torch_table import DDP, FSDP2, PLAIN, of_kind

QUIET = {"PYTHONWARNINGS": "ignore"}  # of torch and torchdata
RANKS = {PLAIN: 1, DDP: 2, FSDP2: 2}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", RANKS)
def test_each_training_of_the_table_goes_on_with_the_same_bits_after_a_kill(shm: Path, kind: str) -> None:
    cluster, ranks, entries = Cluster(shm), RANKS[kind], len(of_kind(kind))
    job = ("programs/contract_job.py", kind, str(shm))
    killed = cluster.run(ranks, *job, "save", env=QUIET, timeout=190)
    assert [r["entries"] for r in killed.of("saved")] == [entries] * ranks
    assert killed.returncode and not killed.of("end"), killed.log
    restored = cluster.run(ranks, *job, "restore", env=QUIET, timeout=190)
    assert [r["entries"] for r in restored.of("end")] == [entries] * ranks, restored.log
    compared = restored.of("compared")
    assert [r for r in compared if r["wrong"]] == []
    assert len(compared) == (8 if kind == PLAIN else 4) * ranks and min(r["leaves"] for r in compared) > 10 * entries


# Shards


def by_case(result: Result, event: str) -> dict[tuple[str, int], dict[str, Any]]:
    return {(r["case"], r["rank"]): {"losses": r.get("losses"), "tensors": r["tensors"]} for r in result.of(event)}


@pytest.mark.slow
def test_an_optimizer_without_state_gets_the_same_bits(shm: Path) -> None:
    """With a plain Checkpointer, and nothing else."""
    cluster = Cluster(shm, ranks_per_node=4)
    saved, restored = (cluster.run(4, "programs/sharded_job.py", task, env=QUIET) for task in ("save", "restore"))
    assert saved.returncode == restored.returncode == 0, saved.log + restored.log
    expected, ended = by_case(saved, "ended"), by_case(restored, "ended")
    assert ended.keys() == expected.keys() and len({case for case, _ in ended}) >= 12
    for case, training in expected.items():
        assert ended[case] == training, case
    # On other ranks each tensor has the bits it had; what cannot be cut anew is refused, and it says what to do.
    refused = {r["case"]: r["why"] for r in restored.of("refused")}
    assert set(refused) == {"fsdp1-adamw", "fsdp1-flat-adamw"}
    assert all("fully_shard" in why for why in refused.values()), refused
    before, on_two = by_case(saved, "half"), by_case(restored, "half")
    assert len(on_two) == 2 * (len(ended) // 4 - len(refused))
    for case, tensors in on_two.items():
        assert tensors == before[case], case


SHARDS = {"replicas": 2, "tensor_and_fsdp": 4, "experts_alone": 2, "experts_and_fsdp": 4}


@pytest.mark.slow
def test_replicas_shards_and_experts_survive_a_kill_in_a_save(shm: Path) -> None:
    """SMP's recipes as its page has them: all replicas go on from whatever one has saved; also with TP and EP."""
    cluster = Cluster(shm)
    killed = cluster.run(4, "programs/smp_job.py", "6", "4", env=QUIET)
    assert killed.returncode != 0 and not killed.of("ended"), killed.log
    assert {record["step"] for record in killed.of("loaded")} == {None}
    again = cluster.run(4, "programs/smp_job.py", "7", env=QUIET)
    assert again.returncode == 0, again.log
    assert again.with_mpi == [False] * 4
    assert len(again.of("ended")) == 4 * len(SHARDS)
    for kind, shards in SHARDS.items():
        steps = [record["step"] for record in again.of("loaded") if record["kind"] == kind]
        assert steps in ([3] * 4, [4] * 4), (kind, steps)
        ended = [record for record in again.of("ended") if record["kind"] == kind]
        assert all(record["digest"] == record["alone"] for record in ended), kind
        assert len({record["digest"] for record in ended}) == shards, "shards and experts differ"


# Any state

STEPS = 2  # memory keeps two steps of a job
SEED = int(os.environ.get("MLFLASH_TEST_SEED") or 1)


def drawn(number: int) -> list[list[list[Spec]]]:
    """Examples: of each job the steps, of each step the descriptions of its ranks; some jobs save nearly the same."""
    jobs: list[list[list[Spec]]] = []

    @seed(SEED)
    @settings(max_examples=-(-number // STEPS), database=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(specs(), specs(), st.booleans(), st.booleans(), st.integers(0, 99))
    def draw(first: Spec, second: Spec, are_alike: bool, is_like_before: bool, by: int) -> None:
        ranks = [first, first if are_alike else second]
        later = [changed(spec, by) for spec in ranks] if is_like_before else [second, first]
        jobs.append([ranks, later])

    draw()
    return jobs


@pytest.mark.timeout(120 + EXAMPLES)
def test_any_state_is_refused_on_all_ranks_or_read_by_a_new_process_bit_for_bit(shm: Path) -> None:
    """It is refused by its path; and its types are the same, too."""
    examples, cluster = drawn(EXAMPLES or 200), Cluster(shm)
    described = shm / "examples"
    described.write_bytes(pickle.dumps(examples))

    def run(task: str) -> Result:
        result = cluster.run(2, "programs/states_worker.py", task, str(described), timeout=100.0 + EXAMPLES)
        last = max((r["job"] for r in result.records if "job" in r), default=0)
        assert result.returncode == 0 and len(result.of("end")) == 2, f"{example(last, 1)}\n{result.log}"
        return result

    def example(job: int, step: int) -> str:
        again = f"MLFLASH_TEST_SEED={SEED} MLFLASH_TEST_EXAMPLES={EXAMPLES or 200}"
        return f"{again}: job {job}\n{examples[job]}\nstep {step}"

    refused: set[tuple[int, int]] = set()
    for record in run("save").of("saved"):
        assert not record["wrong"], f"{example(record['job'], record['step'])}\n{record}"
        refused |= {(record["job"], record["step"])} if record["refused"] else set()
    every = {(job, step) for job, steps in enumerate(examples) for step in range(1, len(steps) + 1)}
    assert len(refused) < len(every) / 2, "most states are of what can be saved"
    records = run("read").of("read")
    for record in records:
        assert not record["wrong"], f"{example(record['job'], record['step'])}\n{record['wrong']}"
    for rank in range(2):
        read = {(r["job"], r["step"]) for r in records if r["rank"] == rank}
        assert read == every - refused, f"{example(*min(read ^ (every - refused)))} is there on one side only"
