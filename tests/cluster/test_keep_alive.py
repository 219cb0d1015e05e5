"""`mlflash run --keep-alive` on nodes that crash: who is left trains on in the same processes, and ends with the same
bits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster.jobs import VENDOR
from cluster.nodes import HEAD, Nodes
from run_results import Results
from waiting import until

from mlflash.launcher.processes import signal_group, spawn

pytest.importorskip("torch.distributed")
pytestmark = pytest.mark.skipif(VENDOR == "openmpi", reason="needs MPICH: Open MPI cannot start without its launcher")
MLFLASH = str(Path(sys.executable).with_name("mlflash"))
TRAINER = Path(__file__).parents[1] / "kept_trainer.py"
ENV = {"FI_PROVIDER": "tcp", "MPIR_CVAR_CH4_NETMOD": "ofi", "OMP_NUM_THREADS": "1"}
LAST, LOST_S = 40, 2


class Run(Results):
    """`mlflash run --keep-alive` on the head.

    Args:
        nodes: that it runs on: three that train, and one with a process that waits.
        training: see `kept_trainer`.
    """

    def __init__(self, nodes: Nodes, **training: Any):
        super().__init__(nodes.path / "out")
        self.nodes = nodes
        training = {"settings": {"job": "kept"}, **training}
        told = ["--keep-alive", "-N", 3, "--hosts", ",".join(nodes.names), "--rsh", nodes.shell, "--job", "kept",
                "--lost-after", LOST_S, "--journal", self.out / "run.jsonl"]  # fmt: skip
        words = [MLFLASH, "run", *told, "--", sys.executable, TRAINER, self.out, LAST, json.dumps(training)]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")} | ENV
        environment["PYTHONPATH"] = str(TRAINER.parent)
        self._log = (self.out / "log").open("w")
        self._process = spawn(nodes.command(HEAD, [*map(str, words)]), stdout=self._log, stderr=self._log,
                              env=environment)  # fmt: skip

    def log(self) -> str:
        return (self.out / "log").read_text()[-20_000:]

    def steps(self, rank: int) -> list[list[str]]:
        """What a rank has noted of each step: when, which, by which process, how often that had entered."""
        path = self.out / f"steps-{rank}"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for(self, step: int) -> None:
        until(lambda: all(any(int(line[1]) >= step for line in self.steps(rank)) for rank in range(3)),
              lambda: f"step {step}:\n{self.log()}")  # fmt: skip

    def go_on(self) -> None:
        (self.out / "go on").touch()

    def wait(self, timeout: float = 90) -> int:
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it still runs after {timeout} s:\n{self.log()}") from None

    def close(self) -> None:
        if self._process.poll() is None:
            signal_group(self._process, signal.SIGKILL)
            self._process.wait(30)
        self._log.close()


@pytest.fixture
def start(nodes: Nodes) -> Iterator[Any]:
    runs: list[Run] = []

    def begin(**training: Any) -> Run:
        runs.append(Run(nodes, **training))
        return runs[-1]

    yield begin
    for run in runs:
        run.close()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Digests of the state of three ranks that nothing happened to."""
    out = tmp_path_factory.mktemp("uninterrupted")
    told = ["-N", 1, "--ranks-per-node", 3, "--launcher", "ssh", "--job", "alone", "--journal", out / "run.jsonl"]
    training = json.dumps({"settings": {"job": "alone", "redundancy": "none"}})
    words = [MLFLASH, "run", *told, "--", sys.executable, TRAINER, out, LAST, training]
    environment = {**os.environ, **ENV, "PYTHONPATH": str(TRAINER.parent), "MLFLASH_MEMORY": str(out)}
    subprocess.run([*map(str, words)], env=environment, check=True, timeout=90)
    return [end["digest"] for end in Results(out).ends()]


def lose(nodes: Nodes, host: str, how: str) -> None:
    if how in ("killed", "stopped"):
        (pid,) = nodes.running(host, str(TRAINER))
        os.kill(pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    else:
        nodes.crash(host, how == "power cut")


@pytest.mark.parametrize("how", ["killed", "stopped", "crash", "power cut"])
def test_the_others_stay_and_train_on_with_the_same_bits(
    start: Any, nodes: Nodes, expected: list[str], how: str
) -> None:
    run = start(hold_at=20)
    run.wait_for(18)
    before = [run.steps(rank)[-1][2] for rank in range(3)]
    lose(nodes, "host2", how)
    run.go_on()
    assert run.wait() == 0, run.log()
    ends = run.ends()
    assert [end["digest"] for end in ends] == expected
    assert [end["node"] for end in ends] == ["host1", "host4", "host3"]
    assert [str(ends[rank]["pid"]) for rank in (0, 2)] == [before[0], before[2]], "who was left stayed"
    assert [end["entries"] for end in ends] == [2, 1, 2]
    (recovered,) = run.events("recovered")
    assert recovered["lost"] == [1] and recovered["step"] >= 17 and len(run.events("start")) == 1
    print(how, recovered)


@pytest.mark.parametrize(
    ("rank", "point"),
    [(0, "left"), *((rank, point) for point in ("couriers", "open", "groups", "restored") for rank in (0, 1))],
)
def test_a_second_loss_in_a_recovery_is_one_more_of_the_same(
    start: Any, nodes: Nodes, expected: list[str], rank: int, point: str
) -> None:
    run = start(hold_at=20, die_in=[[rank, f"round.{point}"]])
    run.wait_for(18)
    lose(nodes, "host2", "killed")  # where a process waits again by the time that it is needed
    run.go_on()
    assert run.wait() == 0, run.log()
    print(run.log(), run.events("recovered"), run.events("late"))
    assert (run.out / f"died-{rank}-round.{point}").exists()
    assert len(run.events("start")) == 1, run.log()
    assert [end["digest"] for end in run.ends()] == expected
