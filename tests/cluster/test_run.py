"""`mlflash run` on nodes that crash: the job goes on with a spare, and ends with the same bits."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster.jobs import NETMODS
from cluster.nodes import HEAD, Nodes
from run_results import WORKER, Launched, uninterrupted
from waiting import until

MLFLASH = str(Path(sys.executable).with_name("mlflash"))
ENV = {**NETMODS["ucx"], "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
LAST = 60
HANG_S = 20  # runs that do not hang must have saved for the first time by then


class Run(Launched):
    """`mlflash run` on the head, told of some hosts."""

    def __init__(self, nodes: Nodes, *options: object, hosts: int = 4, **training: object):
        out, self.nodes, self.directory = nodes.path / "out", nodes, nodes.path / "pfs"
        names = ",".join(f"host{n}" for n in range(1, hosts + 1))
        training = {"pause": 0.03, **training}
        told = ["--hosts", names, "--rsh", nodes.shell, "--look-every", 2, "--directory", self.directory, "--journal",
                out / "run.jsonl", *options]  # fmt: skip
        words = [MLFLASH, "run", *told, "--", sys.executable, WORKER, self.directory, out, LAST, json.dumps(training)]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")} | ENV
        super().__init__(out, nodes.command(HEAD, ["env", f"TMPDIR={out}", *map(str, words)]), environment)

    def go_on(self) -> None:
        """Let a training with ``hold_at`` begin that step."""
        (self.out / "go on").touch()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def memory(self, host: str) -> str:
        return self.nodes.run(host, "find", "/dev/shm", "-name", "slot-*")


@pytest.fixture
def start(nodes: Nodes) -> Iterator[Any]:
    runs: list[Run] = []

    def begin(*options: object, **training: object) -> Run:
        runs.append(Run(nodes, *options, **training))
        return runs[-1]

    yield begin
    for run in runs:
        run.close()


@pytest.fixture
def without_mpiexec(nodes: Nodes) -> None:
    """No node, and not the head, has an mpiexec."""
    folders = [str(Path(sys.executable).parent), *os.environ["PATH"].split(os.pathsep)]
    there = {os.path.realpath(found) for folder in folders if (found := shutil.which("mpiexec", path=folder))}
    for name in (HEAD, *nodes.names):
        for path in there:
            nodes.run(name, "mount", "--bind", "/dev/null", path)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Digests of the state of three ranks that nothing happened to."""
    return uninterrupted(tmp_path_factory.mktemp("uninterrupted"), 3, LAST)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def check_replaced(run: Run, expected: list[str]) -> None:
    """The spare has taken the place of host2, and nothing is left in memory."""
    assert run.wait() == 0, run.log()
    assert [end["digest"] for end in run.ends()] == expected
    assert [end["node"] for end in run.ends()] == ["host1", "host4", "host3"]
    assert all(end["start"] >= 14 for end in run.ends()) and run.events("end")[1]["source"] == "memory"
    assert run.events("finish")[0]["scavenged"] is True
    assert (run.directory / f"step-{LAST:08d}" / "checkpoint.mlflash").exists()
    assert not any(run.memory(host) for host in ("host1", "host3", "host4")), "the nodes were not cleaned"


@pytest.mark.usefixtures("without_mpiexec")
@pytest.mark.parametrize("power_cut", [False, True])
def test_a_spare_replaces_a_lost_node_with_the_same_bits(
    start: Any, nodes: Nodes, expected: list[str], power_cut: bool
) -> None:
    run = start("-N", 3, hold_at=20)
    run.wait_for_step(15)
    nodes.crash("host2", power_cut)
    run.go_on()
    check_replaced(run, expected)
    first, second = run.events("start")
    assert (first["hosts"], second["hosts"]) == (["host1", "host2", "host3"], ["host1", "host4", "host3"])
    failed, ended = run.events("end")
    assert failed["why"] and ended["why"] == "" and 0 <= ended["steps_lost"] <= 2
    assert min(ended[name] for name in ("detect_s", "look_s", "launch_s", "restore_s", "first_step_s", "outage_s")) > 0
    for host in ("host1", "host3", "host4"):
        until(lambda host=host: not nodes.running(host), f"nothing is left on {host}")


@pytest.mark.parametrize("killed", ["rank", "agent"])
def test_a_rank_that_is_killed_is_started_again_and_so_is_an_agent(
    start: Any, nodes: Nodes, expected: list[str], killed: str
) -> None:
    run = start("-N", 3, hold_at=20)
    run.wait_for_step(19)
    (trainer,) = nodes.running("host2", str(WORKER))
    os.kill(trainer if killed == "rank" else parent(trainer), signal.SIGKILL)
    assert run.wait() == 0, run.log()
    assert [end["digest"] for end in run.ends()] == expected and len(run.events("start")) == 2
    assert [end["node"] for end in run.ends()] == ["host1", "host2", "host3"]
    code = 128 + signal.SIGKILL if killed == "rank" else 255
    assert run.events("end")[0]["why"] == f"exit code {code}" and run.events("end")[1]["source"] == "memory"
    assert run.events("finish")[0]["scavenged"] is True


@pytest.mark.parametrize("power_cut", [False, True])
def test_without_a_spare_it_goes_on_with_fewer_nodes(start: Any, nodes: Nodes, power_cut: bool) -> None:
    run = start("-N", 3, "--min-nodes", 2, "--hang-timeout", HANG_S, hosts=3, hold_at=20)
    run.wait_for_step(15)
    nodes.crash("host3", power_cut)
    run.go_on()
    assert run.wait() == 0, run.log()
    assert [end["node"] for end in run.ends()] == ["host1", "host2"]
    assert run.events("start")[1]["hosts"] == ["host1", "host2"] and run.events("finish")[0]["scavenged"] is True


def test_with_too_few_nodes_it_ends_with_the_reason_and_scavenges(start: Any, nodes: Nodes) -> None:
    run = start("-N", 3, hosts=3, hold_at=20)
    run.wait_for_step(15)
    nodes.crash("host3")
    run.go_on()
    assert run.wait() == 1, run.log()
    assert "fewer than 3 nodes are fit to train" in run.log() and "host3 is not fit to train" in run.log()
    (finish,) = run.events("finish")
    assert finish["scavenged"] is True and list(run.directory.glob("step-*/checkpoint.mlflash"))


def test_a_run_that_hangs_shows_its_stacks_and_is_started_again(start: Any, expected: list[str]) -> None:
    run = start("-N", 3, "--hang-timeout", HANG_S, hang_at=20)
    assert run.wait() == 0, run.log()
    assert [end["digest"] for end in run.ends()] == expected
    assert f"no rank has saved for {HANG_S} s" in run.log() and run.log().count("run_worker.py") >= 3, run.log()


def test_a_rank_that_fails_is_started_again(start: Any, expected: list[str]) -> None:
    run = start("-N", 3, fail_at=20)
    assert run.wait() == 0, run.log()
    assert [end["digest"] for end in run.ends()] == expected and len(run.events("start")) == 2


def test_what_fails_at_the_same_step_again_ends_with_its_exit_code(start: Any) -> None:
    run = start("-N", 3, fail_at=20, always=True)
    code = run.wait()
    assert code == 7 and len(run.events("start")) == 2, run.log()
    assert "it failed 2 times after step 19 without a newer checkpoint" in run.log()
    assert run.events("finish")[0]["scavenged"] is True


def test_a_signal_ends_it_with_a_checkpoint_that_the_next_job_restores(start: Any, expected: list[str]) -> None:
    run = start("-N", 3, pause=1.0)
    run.wait_for_step(5)
    run.signal(signal.SIGUSR1)
    assert run.wait() == 128 + signal.SIGUSR1, run.log()
    assert run.events("finish")[0]["scavenged"] is True and not run.ends()
    assert not any(run.memory(host) for host in ("host1", "host2", "host3", "host4"))
    assert start("-N", 3).wait() == 0
    assert [end["digest"] for end in run.ends()] == expected and all(end["start"] >= 5 for end in run.ends())


def test_an_unfit_node_is_replaced_once_its_state_is_fetched(start: Any, nodes: Nodes, expected: list[str]) -> None:
    for host in nodes.names:
        nodes.run(host, "ip", "link", "add", "fast0", "type", "veth", "peer", "name", "fast1")
        for end in ("fast0", "fast1"):
            nodes.run(host, "ip", "link", "set", end, "up")
    run = start("-N", 3, "--interface", "fast0", fail_at=40, hold_at=20, settings={"redundancy": "none"})
    run.wait_for_step(15)
    nodes.run("host2", "ip", "link", "set", "fast0", "down")
    run.go_on()
    assert run.wait() == 0, run.log()
    assert [end["digest"] for end in run.ends()] == expected
    assert run.events("start")[1]["hosts"] == ["host1", "host4", "host3"]
    assert "host2 is not fit to train: fast0 is down" in run.log() and run.events("end")[1]["source"] != "memory"


def test_what_cannot_be_scavenged_stays_in_memory_and_is_no_success(start: Any) -> None:
    run = start("-N", 2, hosts=2, hold_at=20)
    run.wait_for_step(15)
    shutil.rmtree(run.directory, ignore_errors=True)
    run.directory.write_text("not a directory")
    run.go_on()
    assert run.wait() == 1, run.log()
    assert len(run.ends()) == 2 and run.events("finish")[0]["scavenged"] is False
    assert f"could not be copied to {run.directory}; it is in memory of host1, host2" in run.log()
    assert all(run.memory(host) for host in ("host1", "host2"))
