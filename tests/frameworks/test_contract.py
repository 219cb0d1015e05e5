"""What every adapter to a framework keeps: real trainings, killed and begun again, end with the same bits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import HERE, UID, Cluster, Result, own_memory

RANKS, LAST = 2, 7
ENV = {"PYTHONPATH": str(HERE), "PYTHONWARNINGS": "ignore", "MLFLASH_BLOCK_NBYTES": "65536",
       "MLFLASH_CHUNK_NBYTES": "65536", "TOKENIZERS_PARALLELISM": "false"}  # fmt: skip
VARIANTS = {
    "lightning": ["ddp", "fsdp1", "fsdp2", "accumulate", "validate"],
    "transformers": ["ddp", "fsdp2", "accumulate", "zero1", "zero2", "zero3"],
    "deepspeed": ["zero1", "zero3", "accumulate"],
    "torchtitan": ["fsdp2"],
    "nemo": ["megatron"],
}
# Their own checkpoints on disk lack random numbers: nobody goes on from them with the same bits.
NO_RNG_ON_DISK = {"lightning", "nemo"}

pytestmark = pytest.mark.timeout(300)  # the first test of each variant waits for all of its trainings

Losses = dict[tuple[int, int], list[float]]


def run(cluster: Cluster, framework: str, *runs: dict[str, Any], ranks: int = RANKS, timeout: float = 200) -> Result:
    spec = {"framework": framework, "runs": runs}
    return cluster.run(ranks, "frameworks/job.py", json.dumps(spec), env=ENV, timeout=timeout)


def losses(result: Result, name: str) -> Losses:
    """What a training has noted: by rank and step, one loss for each batch."""
    found: Losses = {}
    for record in result.of("loss"):
        if record["run"] == name:
            found.setdefault((record["rank"], record["step"]), []).append(record["loss"])
    return found


def digests(result: Result, name: str) -> list[str]:
    """What has become of each rank's weights and optimizer."""
    return [record["digest"] for record in result.of("end") if record["run"] == name]


def order(result: Result, name: str, rank: int) -> str:
    """In which order a rank of a training noted losses and commits: their first letters."""
    noted = (record for record in result.records if record["rank"] == rank and record["event"] in ("loss", "commit"))
    return "".join(record["event"][0] for record in noted if record["run"] == name)


class Trainings:
    """Trainings in one launch, in the last of which a node dies. Those of one job go on from one another."""

    def __init__(self, framework: str, variant: str, root: Path):
        common = {"variant": variant}
        drained = {"directory": str(root / "drained"), "drain_every": 1, "keep_last": 1}
        first = {"job": "interval", "every": 2}
        disk = {"job": "disk", "every": 2, "disk": 5}
        memory = {"job": "memory", "every": 2, "disk": 3}
        failed = {"job": "failed", "every": 2}
        switched = {"job": "switched", "every": 2, "disk": 3, "switched_off": True}
        kept = {"job": "kept", "every": 1, "settings": drained}
        runs = [
            {"name": "reference", "last": LAST, "job": "reference", "enabled": False},
            {"name": "first", "last": 5, **first},
            {"name": "second", "last": LAST, **first},
            {"name": "damaged", "last": LAST, "damaged": 6, **first},
            {"name": "skips", "last": LAST, "job": "skips", "skip": 3},
            {"name": "after skips", "last": LAST, "job": "skips"},
            {"name": "to disk", "last": 5, **disk},
            {"name": "from disk", "last": LAST, **disk},
            {"name": "to memory", "last": 5, **memory},
            {"name": "from memory", "last": LAST, **memory},
            {"name": "failed save", "last": 5, "refused": 4, **failed},
            {"name": "after failed", "last": LAST, **failed},
            {"name": "kept", "last": 6, **kept},
            {"name": "all lost", "last": LAST, "wiped": True, **kept},
            {"name": "switched off", "last": 5, **switched},
            {"name": "off, gone on", "last": LAST, **switched},
            {"name": "on again", "last": LAST, **switched, "switched_off": False},
        ]
        # Step 2 is saved; in the save of step 4 rank 1 dies with its node and its node's memory.
        trap = {"path": ["commit.recorded", "transfer.sent"], "action": "wipe", "rank": 1}
        self.killed = {"name": "killed", "last": LAST, **common}
        self.root, self.cluster = root, Cluster(root)
        self.result = run(self.cluster, framework, *(common | one for one in runs), {**self.killed, "traps": [trap]})
        assert len(self.result.of("done")) == len(runs) * RANKS, self.result.log

    def goes_on(self, name: str, first: int, last: int = LAST) -> None:
        """Assert that a training took these steps, and that each bit of them is that of the reference."""
        expected = {key: loss for key, loss in losses(self.result, "reference").items() if first <= key[1] <= last}
        assert losses(self.result, name) == expected, (name, self.result.log)
        if last == LAST:
            assert digests(self.result, name) == digests(self.result, "reference"), name


@pytest.fixture(scope="module", params=[(name, variant) for name, variants in VARIANTS.items() for variant in variants],
                ids="-".join)  # fmt: skip
def trained(request: pytest.FixtureRequest) -> Iterator[tuple[str, str, Trainings]]:
    framework, variant = request.param
    with own_memory() as root:
        yield framework, variant, Trainings(framework, variant, root)


@pytest.fixture
def trainings(trained: tuple[str, str, Trainings]) -> Trainings:
    return trained[2]


def test_disabled_it_does_nothing(trainings: Trainings) -> None:
    steps = {step for _, step in losses(trainings.result, "reference")}
    assert steps == set(range(1, LAST + 1)) and len(digests(trainings.result, "reference")) == RANKS
    assert not (trainings.root / f"mlflash-{UID}" / "reference").exists()


def test_switched_off_it_trains_and_goes_on_as_the_framework_does_without(trained: tuple[str, str, Trainings]) -> None:
    framework, _, trainings = trained
    result, root = trainings.result, trainings.root
    trainings.goes_on("switched off", 1, 5)
    assert any((root / "disk-switched").rglob("*")), "the framework's own checkpoint of step 3"
    steps = {step for _, step in losses(result, "off, gone on")}
    # Lightning writes one at the end of an epoch, too, and NeMo where training stops.
    first = {"lightning": {4, 5}, "nemo": {4, 5, 6}}.get(framework, {4})
    assert min(steps) in first and steps == {*range(min(steps), LAST + 1)}, result.log
    if framework not in NO_RNG_ON_DISK:
        trainings.goes_on("off, gone on", 4)
    threads = [record["names"] for record in result.of("threads") if record["run"] in ("switched off", "off, gone on")]
    assert threads == [[]] * 2 * RANKS
    # One for all trainings of a rank's process: that which begins first.
    assert result.log.count("mlflash is off (MLFLASH_DISABLE=1)") == 1, result.log


def test_on_again_it_goes_on_from_what_the_framework_has_written_meanwhile(trainings: Trainings) -> None:
    assert {step for _, step in losses(trainings.result, "on again")} <= {LAST}, trainings.result.log


def test_where_there_is_nothing_training_starts_at_the_first_step(trainings: Trainings) -> None:
    trainings.goes_on("first", 1, 5)


def test_a_new_trainer_goes_on_from_memory_with_the_same_bits(trainings: Trainings) -> None:
    trainings.goes_on("second", 5)


def test_where_the_newest_is_damaged_beyond_repair_it_goes_on_from_the_one_before(trainings: Trainings) -> None:
    trainings.goes_on("damaged", 5)


def test_steps_that_go_to_disk_can_be_left_out(trainings: Trainings) -> None:
    trainings.goes_on("after skips", 5)  # 6 is a multiple of 3


def test_a_newer_checkpoint_on_disk_is_taken(trained: tuple[str, str, Trainings]) -> None:
    framework, _, trainings = trained
    assert {step for _, step in losses(trainings.result, "from disk")} == {6, 7}
    if framework not in NO_RNG_ON_DISK:
        trainings.goes_on("from disk", 6)


def test_a_newer_checkpoint_in_memory_is_taken(trainings: Trainings) -> None:
    trainings.goes_on("from memory", 5)


def test_a_save_that_fails_on_one_rank_stops_no_training(trainings: Trainings) -> None:
    trainings.goes_on("failed save", 1, 5)
    assert "step 4 was not saved" in trainings.result.log
    trainings.goes_on("after failed", 3)


def test_memory_and_directory_keep_what_was_asked_for(trainings: Trainings) -> None:
    files = list(trainings.root.glob(f"mlflash-{UID}/kept/node*/slot-*"))
    # Of six steps: two slots, two shares of what ranks have alike, a third of each to drain from, two copies.
    assert 0 < len(files) <= RANKS * (3 + 3 + 2)
    assert len(list((trainings.root / "drained").glob("step-*"))) == 1


def test_with_all_memory_lost_it_goes_on_from_what_was_drained(trainings: Trainings) -> None:
    trainings.goes_on("all lost", 7)


def test_killed_in_a_save_with_a_node_lost_it_goes_on_with_the_same_bits(trained: tuple[str, str, Trainings]) -> None:
    framework, _, trainings = trained
    crashed = trainings.result
    assert any(trainings.root.glob("out-*/sprung*")), crashed.log
    result = run(trainings.cluster, framework, trainings.killed)
    assert len(result.of("done")) == RANKS, result.log
    found = losses(result, "killed")
    assert min(step for _, step in found) == 3, result.log
    assert losses(crashed, "killed") | found == losses(crashed, "reference")
    assert digests(result, "killed") == digests(crashed, "reference")
