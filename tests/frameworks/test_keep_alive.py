"""A rank of a framework's training is killed within a step: the other one stays, and all ends with the same bits."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from frameworks.test_contract import ENV
from run_results import Launched
from waiting import take, until

HERE, WAIT_S = Path(__file__).parent, 180
MLFLASH = str(Path(sys.executable).with_name("mlflash"))

pytestmark = pytest.mark.timeout(400)


class Training(Launched):
    """A training on this host. Close it."""

    def __init__(self, framework: str, ranks: int, out: Path, memory: Path, last: int, *options: str):
        self.ranks = ranks
        told = ["-N", "1", "--ranks-per-node", str(ranks), "--launcher", "ssh", "--job", out.name, "--journal",
                str(out / "run.jsonl"), *options]  # fmt: skip
        program = [sys.executable, str(HERE / "kept_job.py"), framework, str(out), str(last)]
        paths = os.pathsep.join((str(HERE), str(HERE.parent / "support")))
        environment = {**os.environ, **ENV, "PYTHONPATH": paths, "MLFLASH_MEMORY": str(memory), "OMP_NUM_THREADS": "1"}
        super().__init__(out, [MLFLASH, "run", *told, "--", *program], environment)

    def steps(self, rank: int) -> list[list[str]]:
        """Of each step that a rank has computed the number, the loss and the process, some more than once."""
        path = self.out / f"steps-{rank}"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def losses(self, rank: int) -> dict[int, set[str]]:
        found: dict[int, set[str]] = {}
        for step, loss, _ in self.steps(rank):
            found.setdefault(int(step), set()).add(loss)
        return found

    def hold(self, step: int) -> None:
        """Let it not come beyond a step. A later call lets it go on."""
        (self.out / "hold.part").write_text(str(step))
        (self.out / "hold.part").rename(self.out / "hold")

    def has_begun(self, step: int) -> bool:
        """Whether all ranks have computed a step."""
        return all(steps and int(steps[-1][0]) >= step for steps in map(self.steps, range(self.ranks)))

    def kill(self, rank: int, after: int, hold: int, dice: random.Random) -> None:
        """Kill a rank at a random moment after a step, and wait until all train again, until the step ``hold``."""
        until(lambda: self.has_begun(after), lambda: f"step {after}:\n{self.log()}", WAIT_S)
        recovered = len(self.events("recovered"))
        take(dice.uniform(0.0, 0.05))
        os.kill(int(self.steps(rank)[-1][2]), signal.SIGKILL)
        self.hold(hold)
        until(lambda: len(self.events("recovered")) > recovered, lambda: f"a recovery:\n{self.log()}", WAIT_S)


def check(framework: str, ranks: int, kills: Sequence[int], memory: Path, path: Path, last: int = 60) -> None:
    """Kill ranks one after the other within a step. Losses and state are those of an undisturbed training."""
    dice = random.Random(1)
    undisturbed = Training(framework, ranks, path / "undisturbed", memory, last)
    try:
        assert undisturbed.wait(WAIT_S) == 0, undisturbed.log()
    finally:
        undisturbed.close()
    killed = Training(framework, ranks, path / "killed", memory, last, "--keep-alive", "--spares", "1")
    holds = [last * number // (len(kills) + 1) for number in range(1, len(kills) + 1)] + [last + 1]
    killed.hold(holds[0])
    try:
        for number, rank in enumerate(kills):
            killed.kill(rank, holds[number] - dice.randrange(min(5, holds[0] - 1)), holds[number + 1], dice)
        assert killed.wait(WAIT_S) == 0, killed.log()
        assert len(killed.events("start")) == 1, killed.log()
        for rank in range(ranks):
            assert killed.losses(rank) == undisturbed.losses(rank), killed.log()
        digests = [end["digest"] for end in killed.ends()]
        assert digests == [end["digest"] for end in undisturbed.ends()] and len(digests) == ranks, killed.log()
        print([event["seconds"] for event in killed.events("recovered")])
        if framework != "lightning-fsdp2":  # a process ends, and is replaced, if its last model cannot be freed
            assert [event["lost"] for event in killed.events("recovered")] == [[rank] for rank in kills], killed.log()
            processes = {line[2] for rank in range(ranks) for line in killed.steps(rank)}
            assert len(processes) == ranks + len(kills), "another rank did not stay"
    finally:
        killed.close()


@pytest.mark.parametrize("framework", ["transformers", "lightning", "lightning-fsdp2", "nemo"])
def test_the_other_rank_stays_and_losses_and_state_are_those_of_an_undisturbed_training(
    framework: str, shm: Path, tmp_path: Path
) -> None:
    check(framework, 2, (0, 1), shm, tmp_path)
