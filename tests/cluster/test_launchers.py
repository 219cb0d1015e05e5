"""Trainers on nodes that are apart, under launchers with MPI and without: their couriers start, and they go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from cluster.jobs import NETMODS, mpiexec_on
from cluster.nodes import Nodes
from harness import SUPPORT, read_records
from processes import ran
from waiting import PATIENCE_S, until

TRAINER = SUPPORT / "launch_trainer.py"


def trainer(folder: Path, *more: str, netmod: Mapping[str, str] = NETMODS["ofi"], **options: Any) -> list[str]:
    """The command of a trainer that runs two epochs, and writes what it knows into a folder."""
    names = {**netmod, "PYTHONPATH": os.environ["PYTHONPATH"], "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    argv = [sys.executable, str(TRAINER), json.dumps({"do": "epochs", "epochs": 2, "folder": str(folder), **options})]
    return ["env", *(f"{name}={value}" for name, value in names.items()), *more, *argv]


def check(nodes: Nodes, folder: Path, launcher: str, expected: list[int]) -> None:
    """All ranks had both epochs, each knew who shares its node, and nothing is left on any node."""
    for rank in range(len(expected)):
        said = json.loads((folder / str(rank)).read_text())
        assert (said["launcher"], said["status"], said["nodes"]) == (launcher, 0, expected)
        assert len(said["took"]) == 1 and "mpi4py" not in said["modules"]
        print(f"{launcher}, rank {rank}, courier killed to allreduce done: {1e3 * said['took'][0]:.0f} ms")
    for host in nodes.names:
        until(lambda host=host: not nodes.running(host, "mlflash.launch.agent"), f"no process is left on {host}")
        assert "mpich" not in nodes.run(host, "ls", "/dev/shm")


def test_ranks_on_three_nodes_have_couriers_and_hydra_notices_nothing(nodes: Nodes) -> None:
    ran(*mpiexec_on(nodes, ["host1", "host2", "host3"], 1, trainer(nodes.path)), env=os.environ)
    check(nodes, nodes.path, "hydra", [0, 1, 2])


def test_ranks_whose_host_names_mean_loopback_have_couriers(nodes: Nodes) -> None:
    """As Debian's installer writes /etc/hosts. These nodes have no default route, either."""
    for host in nodes.names:
        assert "default" not in nodes.run(host, "ip", "route")
        write = f"sed '/ {host}$/d' /etc/hosts > /tmp/hosts && echo 127.0.1.1 {host} >> /tmp/hosts"
        nodes.run(host, "sh", "-c", f"{write} && mount --bind /tmp/hosts /etc/hosts")
        assert nodes.run(host, "getent", "hosts", host).split()[0] == "127.0.1.1"
    ran(*mpiexec_on(nodes, ["host1", "host2"], 1, trainer(nodes.path)), env=os.environ)
    check(nodes, nodes.path, "hydra", [0, 1])


# Launchers without MPI


WORKER = SUPPORT / "elastic_worker.py"
# Workers that are started again on some nodes only would find in the store of torchrun itself what dead ones left.
NEW_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


class Torchrun:
    """One torchrun on each of some nodes."""

    def __init__(self, nodes: Nodes):
        self._nodes, self.out = nodes, nodes.path / "out"
        self.out.mkdir()
        self._agents: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, hosts: Sequence[str], options: Sequence[str], env: dict[str, str], *program: str) -> None:
        names = {**NEW_STORE, **env, "OMP_NUM_THREADS": "1", "OUT": str(self.out)}
        settings = [f"{name}={value}" for name, value in names.items()]
        for host in hosts:
            command = self._nodes.command(host, ["env", *settings, *TORCHRUN, *options, *program])
            with (self.out / f"log-{host}").open("ab") as log:
                self._agents[host] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def records(self, event: str) -> list[dict[str, Any]]:
        return read_records(self.out, event)

    def wait_for(self, event: str, count: int) -> list[dict[str, Any]]:
        until(lambda: len(self.records(event)) >= count, lambda: f"{count} times {event}\n{self.log()}")
        return self.records(event)

    def wait(self, *hosts: str, timeout_s: float = PATIENCE_S) -> list[int]:
        until(lambda: all(self._agents[host].poll() is not None for host in hosts), lambda: f"the end\n{self.log()}",
              timeout_s)  # fmt: skip
        return [self._agents[host].returncode for host in hosts]

    def log(self) -> str:
        return "\n".join(path.read_text()[-8000:] for path in sorted(self.out.glob("log-*")))

    def close(self) -> None:
        for agent in self._agents.values():
            agent.kill()
            agent.wait(PATIENCE_S)


@pytest.fixture
def torchrun(nodes: Nodes) -> Iterator[Torchrun]:
    torchrun = Torchrun(nodes)
    yield torchrun
    torchrun.close()


def rendezvous(nnodes: str, per_node: int) -> list[str]:
    conf = "join_timeout=60,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
    return [f"--nnodes={nnodes}", f"--nproc-per-node={per_node}", "--max-restarts=3", "--rdzv-id=run 7",
            "--rdzv-backend=c10d", "--rdzv-endpoint=host1:29500", f"--rdzv-conf={conf}",
            "--monitor-interval=0.1"]  # fmt: skip


def worker_of(**spec: Any) -> list[str]:
    return [str(WORKER), json.dumps(spec)]


@pytest.mark.timeout(240)  # two waits
@pytest.mark.parametrize("initializes", [True, False], ids=["its store", "its port"])
def test_workers_restarted_in_place_go_on_from_memory(nodes: Nodes, torchrun: Torchrun, initializes: bool) -> None:
    """Two nodes of two; nothing names the job but torchrun's id, and nothing else is told to mlflash."""
    hosts = ("host1", "host2")
    worker = worker_of(last=5, holds_at=4, initializes=initializes)
    torchrun.start(hosts, rendezvous("2", 2), NETMODS["ucx"], *worker)
    torchrun.wait_for("holds", 4)
    victim = nodes.running("host2", str(WORKER))[-1]
    os.kill(victim, signal.SIGKILL)
    assert torchrun.wait(*hosts, timeout_s=150) == [0, 0], torchrun.log()
    restored = torchrun.records("restored")
    found = {(record["step"], record["same"], record["mpi"]) for record in restored}
    assert found == {(None, True, False), (3, True, False)}, torchrun.log()
    how = "the store of torch.distributed" if initializes else "MASTER_ADDR and MASTER_PORT"
    assert all(f" ranks met by {how})" in record["courier"] for record in restored)
    assert [record["steps"] for record in torchrun.records("end")] == [[4, 5]] * 4
    for host in hosts:
        until(lambda host=host: not nodes.running(host, "mlflash.launch.agent"), f"no courier is left on {host}")
        assert "mpich" not in nodes.run(host, "ls", "/dev/shm")


@pytest.mark.timeout(240)  # two waits
def test_a_node_is_lost_and_the_others_go_on_with_its_state_in_other_shards(nodes: Nodes, torchrun: Torchrun) -> None:
    torchrun.start(("host1", "host2", "host3"), rendezvous("2:3", 1), NETMODS["ucx"], *worker_of(last=5, holds_at=4))
    torchrun.wait_for("holds", 3)
    nodes.crash("host3")
    (torchrun.out / "go on").touch()
    assert torchrun.wait("host1", "host2", timeout_s=150) == [0, 0], torchrun.log()
    after = [record for record in torchrun.records("restored") if record["size"] == 2]
    assert [(record["step"], record["same"]) for record in after] == [(3, True)] * 2, torchrun.log()
    assert [record["steps"][-1] for record in torchrun.records("end")] == [5, 5]


OFI = {"MPIR_CVAR_CH4_NETMOD": "ofi"}  # and no provider


@pytest.mark.parametrize("env", [OFI, {"MPIR_CVAR_CH4_NETMOD": "ucx"}], ids=["ofi", "ucx"])
def test_ranks_find_each_other_on_the_interface_that_is_named(nodes: Nodes, env: dict[str, str]) -> None:
    """Each host has another one, which comes first and leads nowhere; ranks are started one by one, as ssh does."""
    for number, host in enumerate(("host1", "host2")):
        nodes.run(host, "ip", "link", "add", "a0", "type", "veth", "peer", "name", "a1")
        nodes.run(host, "ip", "addr", "add", f"10.99.{number}.1/24", "dev", "a0")
        for name in ("a0", "a1"):
            nodes.run(host, "ip", "link", "set", name, "up")
    started = []
    for rank, host in enumerate(("host1", "host2")):
        names = {"NCCL_SOCKET_IFNAME": "^a,lo", "MASTER_ADDR": "host1", "MASTER_PORT": "29400", "RANK": rank,
                 "WORLD_SIZE": 2}  # fmt: skip
        words = [f"{name}={value}" for name, value in names.items()]
        command = nodes.command(host, trainer(nodes.path, *words, netmod=env))
        started.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))
    assert [process.wait(PATIENCE_S) for process in started] == [0, 0]
    check(nodes, nodes.path, "torchrun", [0, 1])


SAVES = """
import json, os, sys, time, mlflash
def say(**what):
    print(json.dumps({"rank": int(os.environ["RANK"]), **what}), flush=True)
def save(step):
    start = time.monotonic()
    try:
        ckpt.save(step, {"a": bytes(100_000)}).wait()
    except mlflash.errors.MlflashError as error:
        say(failed=step, why=str(error), seconds=time.monotonic() - start)
        return False
    return True
try:
    with mlflash.Checkpointer(job="j", timeout_s=float(sys.argv[1])) as ckpt:
        step = 1
        while save(step):
            step += 1
            say(saved=step - 1) if step == 2 else None
        for more in (1, 2, 3):
            save(step + more)
except mlflash.errors.MlflashError as error:
    say(refused=str(error))
"""


def started(nodes: Nodes, hosts: Sequence[str], timeout_s: float) -> dict[str, subprocess.Popen[str]]:
    """One rank on each of these hosts, which save until it fails, and three times more."""
    found = {}
    for rank, host in enumerate(hosts):
        names = {**NETMODS["ucx"], "MASTER_ADDR": hosts[0], "MASTER_PORT": "29400", "RANK": str(rank),
                 "WORLD_SIZE": str(len(hosts)), "OMP_NUM_THREADS": "1"}  # fmt: skip
        words = ["env", *(f"{name}={value}" for name, value in names.items())]
        command = nodes.command(host, [*words, sys.executable, "-c", SAVES, str(timeout_s)])
        found[host] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    return found


def test_who_has_lost_the_host_of_rank_0_is_told_in_time(nodes: Nodes) -> None:
    ranks = started(nodes, ("host1", "host2", "host3"), 10.0)
    for rank in ranks.values():
        assert rank.stdout is not None and "saved" in rank.stdout.readline()
    nodes.crash("host1")
    for host in ("host2", "host3"):
        lines = ranks[host].communicate(timeout=PATIENCE_S)[0].splitlines()
        said = [json.loads(line) for line in lines if line.startswith("{")]
        assert ranks[host].returncode == 0 and len(said) == 4 and all("failed" in record for record in said), said
        assert "the host of rank 0, at which they meet, does not answer" in said[0]["why"]
        assert all(record["seconds"] < 8 for record in said[1:]), "later saves wait for nobody"
    ranks["host1"].communicate(timeout=PATIENCE_S)


def test_two_hosts_without_a_route_end_the_start_on_all_ranks(nodes: Nodes) -> None:
    for host, other in (("host2", "host3"), ("host3", "host2")):
        nodes.run(host, "ip", "route", "add", "blackhole", f"{nodes.address(other)}/32")
    ranks = started(nodes, ("host1", "host2", "host3"), PATIENCE_S / 2)
    for rank in ranks.values():
        lines = rank.communicate(timeout=PATIENCE_S)[0].splitlines()  # of UCX, too
        (said,) = (json.loads(line) for line in lines if line.startswith("{"))
        assert "could not start MPI" in said["refused"] and "MLFLASH_INTERFACE" in said["refused"]
