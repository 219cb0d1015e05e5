"""`mlflash scavenge`, `reprotect`, `drain` and the looking commands on what real jobs have left, or while they run."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from damage import flip
from harness import SUPPORT, Cluster, assert_restored, train_and_die
from processes import ran
from waiting import PATIENCE_S

from mlflash.run.processes import mpiexec

MLFLASH = str(Path(sys.executable).with_name("mlflash"))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "drained"


def command(cluster: Cluster, *arguments: object, ranks: int = 0, per_node: int = 1, code: int = 0) -> str:
    """Run a command under mpiexec, or alone on node 0; its stdout."""
    line = [MLFLASH, *map(str, arguments)]
    env = {**os.environ, "MLFLASH_MEMORY": str(cluster.root if ranks else cluster.root / "node0"),
           "MLFLASH_JOB": cluster.job, "PYTHONWARNINGS": "error", "MLFLASH_TRANSPORT": cluster.transport,
           "TMPDIR": str(cluster.out), "RANKS_PER_NODE": str(per_node)}  # fmt: skip
    if ranks:
        line, env = mpiexec(ranks, [sys.executable, str(SUPPORT / "on_node.py"), *line], env)
    else:
        env["MLFLASH_NODE"] = "node0"
    done = ran(*line, env=env, code=code)
    return done.stdout + (done.stderr if code else "")


def document(cluster: Cluster, *arguments: object, **how: int) -> Any:
    """What a command says as JSON."""
    return json.loads(command(cluster, *arguments, "--json", **how))


def wipe_all(cluster: Cluster) -> None:
    for memory in cluster.root.glob("node*"):
        shutil.rmtree(memory)


@pytest.mark.parametrize(("nodes", "per_node", "scheme", "alike", "lost", "processes", "per"), [
    pytest.param(2, 2, "copy", False, [1], 1, 1, id="one process for four ranks"),
    pytest.param(4, 1, "xor:4", True, [2], 3, 1, id="parity and shared state"),
    pytest.param(4, 1, "rs:2+2", False, [0, 3], 4, 2, id="two nodes lost, two processes on each other one"),
])  # fmt: skip
def test_what_is_scavenged_comes_back_bit_for_bit(
    shm: Path, directory: Path, nodes: int, per_node: int, scheme: str, alike: bool, lost: list[int], processes: int,
    per: int
) -> None:  # fmt: skip
    cluster, ranks = Cluster(shm, per_node), nodes * per_node
    spec = {"alike": alike, "options": {"redundancy": scheme}}
    train_and_die(cluster, ranks, 3, **spec)
    cluster.wipe(*lost)
    left = [node for node in range(nodes) if node not in lost]
    cluster.move({node: number for number, node in enumerate(left)})
    found = document(cluster, "scavenge", directory, ranks=processes, per_node=per)
    assert (found["drained"], found["lost"], found["newest"]) == (3, None, 3)
    assert found["nbytes"] > 300_000 and Path(found["path"]).parent == directory
    assert document(cluster, "status", "-d", directory, ranks=processes, per_node=per)["newest"] == 3  # it is there yet
    wipe_all(cluster)
    spec["options"] = {"redundancy": scheme, "directory": str(directory)}
    assert_restored(cluster.train(ranks, last=4, **spec), ranks, 3)


def test_what_is_left_in_memory_is_exported_whole(shm: Path, tmp_path: Path) -> None:
    cluster = Cluster(shm)
    train_and_die(cluster, 3, 3, options={"redundancy": "xor:3"})
    cluster.wipe(0)
    cluster.move({1: 0, 2: 1})
    out = tmp_path / "out"
    found = document(cluster, "export", "newest", out, "--to", "torch", ranks=2)
    assert (found["step"], found["tensors"], found["path"]) == (3, 3, str(out))
    numbers = np.random.default_rng((0, 3))  # what rank 0 had, see worker.py; its node is lost
    weights, moments = numbers.integers(0, 256, 300_000, dtype=np.uint8), numbers.standard_normal(1000)
    state = torch.load(out / "state.pt")
    assert state["weights"].numpy().tobytes() == weights.tobytes()
    assert state["moments"][0].numpy().tobytes() == moments.tobytes()
    assert state["history"][:3] == [0, 3, "step 3"] and state["lr"] == 1 / 4


def test_what_is_not_looked_at_is_named(shm: Path, directory: Path) -> None:
    cluster = Cluster(shm)
    train_and_die(cluster, 2, 2)
    text = command(cluster, "scavenge", directory, "--job", "other", ranks=2, code=1)
    assert "this node holds nothing of other, but of j: name it with --job" in text
    assert not directory.exists()


def test_where_too_much_is_lost_nothing_is_drained_and_that_is_said(shm: Path, directory: Path) -> None:
    cluster = Cluster(shm, ranks_per_node=2)
    train_and_die(cluster, 4, 2, options={"redundancy": "none"})
    cluster.wipe(1)
    text = command(cluster, "scavenge", directory, ranks=1, code=1)
    assert "step 2 was committed, but memory can no longer give it: the slots of ranks 2-3 are gone" in text
    assert not directory.exists()
    found = document(cluster, "status", ranks=1, code=1)
    assert (found["newest"], found["well"], found["attempts"][0]["missing_ranks"]) == (None, False, [2, 3])
    assert "memory has nothing that can be restored" in command(cluster, "reprotect", ranks=1, code=1)
    wipe_all(cluster)
    command(cluster, "scavenge", directory, ranks=1, code=1)


def test_a_slot_that_is_damaged_is_not_drained(shm: Path, directory: Path) -> None:
    cluster = Cluster(shm)
    train_and_die(cluster, 2, 3, options={"redundancy": "none"})
    for path in cluster.slot_files():
        flip(path, 200_000)
    assert "step 3 in memory is damaged" in command(cluster, "scavenge", directory, ranks=2, code=1)
    assert not directory.exists() or not list(directory.rglob("*.distcp"))
    assert [len(node["damaged"]) for node in document(cluster, "verify", ranks=2, code=1)["memory"]] == [2, 2]


def test_after_a_reprotection_any_other_node_may_be_lost(shm: Path) -> None:
    cluster = Cluster(shm)
    spec = {"alike": True, "options": {"redundancy": "xor:3"}}
    train_and_die(cluster, 3, 3, **spec)
    assert document(cluster, "status", ranks=3)["survives"]["fatal"] == []
    cluster.wipe(0)
    assert document(cluster, "status", ranks=3)["survives"]["fatal"] != []
    found = document(cluster, "reprotect", ranks=3)
    assert (found["step"], found["scheme"]) == (3, "xor:3")
    assert found["survives"].startswith("any 1 of 3 nodes"), found
    assert document(cluster, "status", ranks=3)["survives"]["fatal"] == []
    assert [node["damaged"] for node in document(cluster, "verify", ranks=3)["memory"]] == [[], [], []]
    cluster.wipe(1)
    assert_restored(cluster.train(3, last=4, **spec), 3, 3)


def test_a_reprotection_says_how_many_processes_it_takes(shm: Path) -> None:
    cluster = Cluster(shm, ranks_per_node=2)
    train_and_die(cluster, 4, 2)
    cluster.wipe(1)
    text = command(cluster, "reprotect", ranks=2, per_node=1, code=2)
    assert "step 2 was saved by 4 ranks, and you started 2" in text and "mpiexec -n 4" in text
    document(cluster, "reprotect", ranks=4, per_node=2)


def test_a_job_that_is_alive_is_looked_at_asked_and_not_scavenged(shm: Path, directory: Path) -> None:
    cluster = Cluster(shm, ranks_per_node=2)
    options = {"directory": str(directory)}
    job = cluster.begin(4, program="keep_saving", last=5, busy_until="enough", pause=0.01, options=options)
    job.wait_for("committed", 40)
    pids = set(job.pids().values())
    files = set(cluster.root.glob("node*/**/*"))
    for _ in range(5):
        found = document(cluster, "status", ranks=2)
        assert found["alive"] and found["well"] and {node["pid"] for node in found["nodes"]} <= pids
        checked = document(cluster, "verify", ranks=2)["memory"]
        assert [node["damaged"] for node in checked] == [[], []]
    assert set(cluster.root.glob("node*/**/*")) == files  # looking makes nothing
    document(cluster, "list", ranks=4, per_node=2)
    refused = command(cluster, "scavenge", directory, ranks=2, code=1)
    assert "job j is alive on this node: end it first" in refused
    assert json.loads(command(cluster, "clean", "--dry-run", "--json", "j", code=1).split("Error")[0])["jobs"][0]["pid"]
    newest = max(record["step"] for record in job.wait_for("committed", 40))
    drained = document(cluster, "drain", "--wait", PATIENCE_S, "-d", directory)
    assert drained["drained"] >= newest >= 10 and (Path(drained["path"]) / "checkpoint.mlflash").exists()
    (job.out / "enough").touch()
    result = job.wait()
    assert len(result.of("end")) == 4, result.log
    assert [r["report"]["counts"]["drained"] for r in result.of("end")] == [1] * 4
    assert "no process of job j is alive" in command(cluster, "drain", code=1)
    good = document(cluster, "verify", "-d", directory, ranks=2)
    assert good["directory"][0]["files"] == 12 and not good["directory"][0]["damaged"]


def test_each_node_says_what_it_has_of_a_step(shm: Path) -> None:
    cluster = Cluster(shm)
    train_and_die(cluster, 3, 2, alike=True)
    found = document(cluster, "inspect", 2, "weights", ranks=3)
    (tensor,) = found["tensors"]
    assert (tensor["shape"], tensor["dtype"], tensor["nbytes"]) == ([300_000], "|u1", 300_000)
    assert [shard["rank"] for shard in tensor["shards"]] == [0, 1, 2]
    assert [shard["node"] for shard in tensor["shards"]] == ["node0", "node1", "node2"]
    assert len({shard["statistics"]["check"] for shard in tensor["shards"]}) == 1
    alone = document(cluster, "inspect", 2, "weights")["tensors"][0]["shards"]
    assert [(shard["rank"], shard["node"]) for shard in alone] == [(0, "node0"), (2, "node0")]  # its own, and a copy
    assert alone[0] == tensor["shards"][0] and alone[1]["statistics"] == tensor["shards"][2]["statistics"]
    private = document(cluster, "inspect", 2, "moments.0", ranks=3)["tensors"]
    assert [tensor["shape"] for tensor in private] == [[1000], [1001], [1002]]
