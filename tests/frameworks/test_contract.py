"""What every adapter to a framework keeps: real trainings, killed and begun again, end with the same bits."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import UID, Cluster, Result, own_memory

RANKS, LAST = 2, 7
ENV = {"PYTHONWARNINGS": "ignore", "MLFLASH_TEST_BLOCK_NBYTES": "16384", "TOKENIZERS_PARALLELISM": "false"}  # fmt: skip
VARIANTS = {
    "lightning": ["ddp", "fsdp1", "fsdp2", "accumulate"],
    "transformers": ["ddp", "fsdp2", "accumulate", "zero1", "zero3"],
    "deepspeed": ["zero1", "zero3", "accumulate"],
    "torchtitan": ["fsdp2"],
    "nemo": ["megatron"],
}
# What each framework's page starts the first variant with; mpiexec starts the others.
LAUNCHERS = {"lightning": "torchrun", "transformers": "accelerate", "deepspeed": "deepspeed", "torchtitan": "torchrun",
             "nemo": "torchrun"}  # fmt: skip
# Their own checkpoints on disk lack random numbers: nobody goes on from them with the same bits.
NO_RNG_ON_DISK = {"lightning", "nemo"}
# Those that save while training goes on, and where not: there no tensor of what is saved is an optimizer's own, all is
# copied at once, and the log says why. The others copy at once.
EAGER: dict[str, set[str]] = {"lightning": {"fsdp1"}, "transformers": set(), "torchtitan": set(), "deepspeed": set(),
                               "nemo": set()}  # fmt: skip

pytestmark = pytest.mark.timeout(300)  # the first test of each variant waits for all of its trainings

Losses = dict[tuple[int, int], list[float]]


def run(cluster: Cluster, framework: str, *runs: dict[str, Any], ranks: int = RANKS, timeout: float = 200,
        launcher: str = "") -> Result:  # fmt: skip
    spec = {"framework": framework, "runs": runs}
    is_first = runs[0].get("variant") in VARIANTS.get(framework, [])[:1]
    launcher = launcher or (LAUNCHERS[framework] if is_first else "mpiexec")
    return cluster.run(ranks, "frameworks/job.py", json.dumps(spec), env=ENV, timeout=timeout, launcher=launcher)


def losses(result: Result, name: str) -> Losses:
    found: Losses = {}
    for record in result.of("loss"):
        if record["run"] == name:
            found.setdefault((record["rank"], record["step"]), []).append(record["loss"])
    return found


def steps(result: Result, name: str) -> list[int]:
    return sorted({step for _, step in losses(result, name)})


def digests(result: Result, name: str) -> list[str]:
    return [record["digest"] for record in result.of("end") if record["run"] == name]


def order(result: Result, name: str, rank: int) -> str:
    """In which order a rank of a training noted losses and commits: their first letters."""
    noted = (record for record in result.records if record["rank"] == rank and record["event"] in ("loss", "commit"))
    return "".join(record["event"][0] for record in noted if record["run"] == name)


# By framework, which steps of five it saves by itself, for each of its triggers; the first is an interval.
TRIGGERS: dict[str, dict[str, list[int]]] = {
    "transformers": {
        "steps": [2, 4], "ratio": [2, 4], "last step": [4, 5], "epoch": [4, 5], "epoch ends early": [3, 5],
        "best": [1, 2, 3, 4, 5], "best at end": [2, 4], "model only": [2, 4], "callback": [3], "no": [],
    },
    "lightning": {
        "train steps": [2, 4], "epochs": [4, 5], "time": [1, 2, 3, 4, 5], "epoch end": [4, 5], "validation": [2, 4],
        "last": [5], "weights only": [2, 4], "by hand": [3], "none": [],
    },
    "torchtitan": {"interval": [2, 4], "last step": [5], "first step": [1], "load only": [], "off": []},
    "deepspeed": {"save_checkpoint": [2, 4], "storage_every": [2, 4], "nothing": []},
    "nemo": {"train steps": [2, 4], "time": [1, 2, 3, 4, 5], "epochs": [5], "by hand": [3], "none": []},
}  # fmt: skip
# What the log names where the framework saves nothing, as far as it can be told when training begins.
TURNS_ON = {"no": "save_mem_interval", "callback": "every_n_steps", "none": "every_n_steps", "by hand": "every_n_steps",
            "load only": "load_only", "off": "--checkpoint.enable"}  # fmt: skip
# Names that the frameworks give to their checkpoints. NeMo's count from 0; those of Lightning say their step inside.
NAMES = {"transformers": r"checkpoint-(\d+)", "torchtitan": r"step-(\d+)", "deepspeed": r"global_step(\d+)",
         "nemo": r"step=(\d+)(?:-last)?"}  # fmt: skip


class OwnSaves:
    """For each trigger of a framework a training that memory is to follow, ended after step 5; then gone on with.

    One more is killed in step 5, and one more is told an interval for memory.
    """

    def __init__(self, framework: str, root: Path):
        self.framework, self._root = framework, root
        interval, cluster = next(iter(TRIGGERS[framework])), Cluster(root)
        begun = {name: self._spec(name, name, follows=True) for name in TRIGGERS[framework]}
        begun["named"] = self._spec("named", interval, every=3)
        begun["killed"] = self._spec("killed", interval, follows=True)
        first = run(cluster, framework, *(one | {"last": 5} for one in list(begun.values())[:-1]),
                    begun["killed"] | {"last": LAST, "dies_at": 5})  # fmt: skip
        assert len(first.of("done")) == (len(begun) - 1) * RANKS, first.log
        self.held = [record["steps"] for record in first.of("held")]
        self.on_disk = {name: self._steps_on_disk(spec["job"]) for name, spec in begun.items()}
        self.in_memory = {name: self._commits(Path(spec["settings"]["log"])) for name, spec in begun.items()}
        self.said = {name: self._said(first, name) for name in begun}
        self._second = run(cluster, framework, *(one | {"last": LAST} for one in begun.values()))
        assert len(self._second.of("done")) == len(begun) * RANKS, self._second.log

    def goes_on(self, name: str, newest: int) -> None:
        """Assert that a training went on from a step of memory; 0: from the beginning."""
        assert min(step for _, step in losses(self._second, name)) == newest + 1, self._second.log
        restored = {text for text in self._said(self._second, name) if text.startswith("restored step")}
        expected = {f"restored step {newest} from memory"} if newest else set()
        assert {text.partition(" in ")[0] for text in restored} == expected

    def _spec(self, name: str, trigger: str, **more: Any) -> dict[str, Any]:
        job = f"own-{name}".replace(" ", "-")
        variant = "validate" if trigger == "validation" else VARIANTS[self.framework][0]
        disk = 2 if self.framework == "deepspeed" and trigger != "nothing" else 0
        return {"name": name, "job": job, "trigger": trigger, "variant": variant, "disk": disk,
                "settings": {"log": str(self._root / f"{job}.jsonl")}, **more}  # fmt: skip

    def _steps_on_disk(self, job: str) -> list[int]:
        folder = self._root / f"disk-{job}"
        if self.framework == "lightning":
            return sorted({torch.load(path, weights_only=False)["global_step"] for path in folder.rglob("*.ckpt")})
        found = [re.fullmatch(NAMES[self.framework], path.name) for path in folder.rglob("*")]
        return sorted({int(name[1]) + (self.framework == "nemo") for name in found if name})

    @staticmethod
    def _commits(log: Path) -> list[int]:
        events = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        return [event["step"] for event in events if event["event"] == "commit"]

    @staticmethod
    def _said(result: Result, name: str) -> list[str]:
        return [record["text"] for record in result.of("said") if record["run"] == name]


@pytest.fixture(scope="module")
def own_saves(request: pytest.FixtureRequest) -> Iterator[OwnSaves]:
    with own_memory() as root:
        yield OwnSaves(request.param, root)


@pytest.mark.parametrize(("own_saves", "trigger"), [(one, trigger) for one in TRIGGERS for trigger in TRIGGERS[one]],
                         indirect=["own_saves"], scope="module")  # fmt: skip
def test_without_an_interval_memory_has_the_steps_that_the_framework_saves(own_saves: OwnSaves, trigger: str) -> None:
    expected = TRIGGERS[own_saves.framework][trigger]
    assert own_saves.in_memory[trigger] == own_saves.on_disk[trigger] == expected
    own_saves.goes_on(trigger, max(expected, default=0))
    (said,) = [text for text in own_saves.said[trigger] if "in memory" in text]
    assert said.startswith("nothing is saved in memory: " if trigger in TURNS_ON else "saving in memory whenever ")
    assert TURNS_ON.get(trigger, "") in said


@pytest.mark.parametrize("own_saves", TRIGGERS, indirect=True, scope="module")
def test_killed_it_goes_on_from_the_newest_step_that_the_framework_has_saved(own_saves: OwnSaves) -> None:
    assert own_saves.held == [own_saves.on_disk["killed"]] * RANKS == [[2, 4]] * RANKS
    own_saves.goes_on("killed", 4)


@pytest.mark.parametrize("own_saves", TRIGGERS, indirect=True, scope="module")
def test_an_interval_that_is_named_holds_and_nothing_else(own_saves: OwnSaves) -> None:
    assert own_saves.on_disk["named"] == [2, 4]
    assert own_saves.in_memory["named"] == [3]
    assert "saving in memory every 3 steps" in own_saves.said["named"]


class Trainings:
    """Trainings in one launch. Those of one job go on from one another."""

    def __init__(self, framework: str, variant: str, root: Path):
        common = {"variant": variant}
        # The fourth checkpoint is due; the sixth, which is the last of its run, is not.
        drained = {"directory": str(root / "drained"), "drain_every": 4, "keep_last": 1}
        first = {"job": "interval", "every": 2}
        disk = {"job": "disk", "every": 2, "disk": 5}
        memory = {"job": "memory", "every": 2, "disk": 3}
        failed = {"job": "failed", "every": 2}
        switched = {"job": "switched", "every": 2, "disk": 3, "switched_off": True}
        kept = {"job": "kept", "every": 1, "settings": drained}
        runs = [
            {"name": "reference", "last": LAST, "job": "reference", "enabled": False},
            {"name": "first", "last": 4, **first, "every": 1, "late": True},
            {"name": "second", "last": LAST, "damaged": 4, **first},
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
        self.root = root
        self.result = run(Cluster(root), framework, *(common | one for one in runs))
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
    assert not list(trainings.root.glob(f"node*/mlflash-{UID}/reference"))


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
    trainings.goes_on("first", 1, 4)


def test_a_new_trainer_goes_on_from_memory_with_the_same_bits(trainings: Trainings) -> None:
    trainings.goes_on("second", 4)


def test_what_is_still_to_be_copied_is_copied_before_training_changes_it(trained: tuple[str, str, Trainings]) -> None:
    framework, variant, trainings = trained
    is_lazy = framework in EAGER and variant not in EAGER[framework]
    assert {record["rank"] for record in trainings.result.of("late")} == ({*range(RANKS)} if is_lazy else set())
    said = [record["text"] for record in trainings.result.of("said") if record["run"] == "first"]
    is_told = framework in EAGER and not is_lazy
    assert len([text for text in said if text.startswith("saves copy everything before they return")]) == is_told, said
    trainings.goes_on("second", 4)  # from step 3, of which the rest was copied by step 4


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
    files = list(trainings.root.glob(f"node*/mlflash-{UID}/kept/slot-*"))
    # Of six steps: two slots, two shares of what ranks have alike, a third of each to drain from, two copies.
    assert 0 < len(files) <= RANKS * (3 + 3 + 2)
    assert len(list((trainings.root / "drained").glob("step-*"))) == 1


def test_with_all_memory_lost_it_goes_on_from_what_was_drained(trainings: Trainings) -> None:
    """NVIDIA-NeMo/Megatron-Bridge#5922: of a run that ended by itself, only memory had the last step."""
    trainings.goes_on("all lost", 7)


@pytest.mark.parametrize("framework", ["lightning", "transformers"])
def test_killed_after_the_last_batch_of_an_epoch_it_does_the_same_steps_with_the_same_samples(
    shm: Path, framework: str
) -> None:
    """verl#7401: the loader went on at the end of its epoch, and the next epoch was left out, with exit code 0.

    No training is told how many steps there are: three epochs of four batches each. The losses show the samples, all
    of which differ.
    """
    cluster, common = Cluster(shm), {"every": 4, "last": 99}
    alone, read = ({"name": name, "job": name, "variant": f"workers {workers}", **common}
                   for name, workers in (("alone", 0), ("read", 2)))  # fmt: skip
    whole = {"name": "whole", "job": "whole", "variant": "workers 0", "enabled": False, **common}
    first = run(cluster, framework, whole, {**alone, "dies_at": 5})
    second = run(cluster, framework, alone, {**read, "dies_at": 5})
    third = run(cluster, framework, read)
    expected = losses(first, "whole")
    assert expected.keys() == {(rank, step) for rank in range(RANKS) for step in range(1, 13)}, first.log
    assert len({loss for noted in expected.values() for loss in noted}) == 12 * RANKS
    for killed, gone_on, name in ((first, second, "alone"), (second, third, "read")):
        assert [record["steps"] for record in killed.of("held")] == [[4]] * RANKS, killed.log
        assert losses(gone_on, name) == {key: loss for key, loss in expected.items() if key[1] > 4}, gone_on.log
        assert digests(gone_on, name) == digests(first, "whole")
    assert third.returncode == 0 and len(third.of("done")) == RANKS, third.log


FIRST = [pytest.param(name, variants[0], marks=pytest.mark.gate) for name, variants in VARIANTS.items()]
# huggingface/transformers#48569: with tensor parallelism (tp), the Trainer cannot go on from its own checkpoints, so
# the trainings above, which have some, leave it out.
SHARDED = [("lightning", "fsdp2"), ("transformers", "zero3"), ("transformers", "tp"), ("deepspeed", "zero3")]


@pytest.mark.parametrize(("framework", "variant"), FIRST + SHARDED)
def test_killed_in_a_save_with_a_node_lost_it_goes_on_with_the_same_bits(
    shm: Path, framework: str, variant: str
) -> None:
    cluster, killed = Cluster(shm), {"name": "killed", "last": LAST, "variant": variant}
    # Step 2 is saved; in the save of step 4 rank 1 dies with its node and its node's memory.
    trap = {"path": ["commit.recorded", "transfer.sent"], "action": "wipe", "rank": 1}
    whole = {"name": "reference", "last": LAST, "job": "reference", "enabled": False, "variant": variant}
    crashed = run(cluster, framework, whole, {**killed, "traps": [trap]})
    assert any(shm.glob("out-*/sprung*")), crashed.log
    result = run(cluster, framework, killed)
    assert len(result.of("done")) == RANKS, result.log
    assert result.with_mpi == [False] * RANKS, "a trainer has loaded MPI"
    found = losses(result, "killed")
    assert min(step for _, step in found) == 3, result.log
    assert losses(crashed, "killed") | found == losses(crashed, "reference")
    assert digests(result, "killed") == digests(crashed, "reference")


# What goes wrong on one rank when a framework loads its objects from memory

MODEL, OPTIMIZER = "torch.nn.Module.load_state_dict", "torch.optim.Optimizer.load_state_dict"
WRAPPED = "accelerate.optimizer.AcceleratedOptimizer.load_state_dict"
LOADS = [
    ("lightning", "fsdp2", MODEL), ("lightning", "ddp", OPTIMIZER),
    ("transformers", "ddp", MODEL), ("transformers", "fsdp2", WRAPPED), ("deepspeed", "zero1", MODEL),
    ("torchtitan", "fsdp2", OPTIMIZER), ("nemo", "megatron", MODEL),
]  # fmt: skip


@pytest.mark.parametrize(("framework", "variant", "call"), LOADS)
def test_an_object_that_cannot_be_loaded_on_one_rank_ends_the_start_on_all(
    shm: Path, framework: str, variant: str, call: str
) -> None:
    common = {"job": "spoilt", "variant": variant}
    result = run(
        Cluster(shm), framework,
        {"name": "first", "last": 4, **common},
        {"name": "spoilt", "last": 6, "spoilt": call, **common},
        timeout=90,
    )  # fmt: skip
    assert len(result.of("done")) == 2 * RANKS and not losses(result, "spoilt"), result.log
    said = [record["error"] for record in (*result.of("refused"), *result.of("failed"))]  # TorchTitan's notes it itself
    assert len(said) == RANKS, result.log
    for error in said:
        assert error.startswith("StructureMismatch: loading failed: ") and "spoilt on purpose" in error, said
        assert "now undefined" in error and "rank 1" in error, said
