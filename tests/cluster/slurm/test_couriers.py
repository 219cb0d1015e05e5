"""Trainers that srun starts, with and without its PMI, start their couriers with one call."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from cluster.jobs import NETMODS
from cluster.slurm.daemons import Slurm
from cluster.slurm.jobs import MLFLASH
from cluster.test_launchers import check, trainer
from harness import SUPPORT, read_records
from waiting import PATIENCE_S, until

from mlflash.launch.agent_process import READY


def run(slurm: Slurm, name: str, options: list[str], *more: str, **trainers: Any) -> Path:
    folder = slurm.path / name
    folder.mkdir()
    slurm.run("srun", *options, *trainer(folder, *more, **trainers))
    return folder


def test_ranks_of_srun_have_couriers(slurm: Slurm) -> None:
    two = ["-N2", "--ntasks-per-node=1"]
    folder = run(slurm, "pmi2", [*two, "--mpi=pmi2"])
    check(slurm.nodes, folder, "srun", [0, 1])
    folder = run(slurm, "port", [*two, "--mpi=none"], "MASTER_ADDR=host1", "MASTER_PORT=29400")
    check(slurm.nodes, folder, "srun", [0, 1])
    folder = run(slurm, "directory", ["-N1", "-n2", "--mpi=none"], directory="/dev/shm/private")
    check(slurm.nodes, folder, "srun", [0, 0])
    folder = run(slurm, "nothing", [*two, "--mpi=none"], do="fails", directory="/dev/shm/private")
    for rank in ("0", "1"):
        said = json.loads((folder / rank).read_text())
        assert said["kind"] == "WorldMismatch" and "set MASTER_ADDR to the name of rank 0's host" in said["error"]
        assert said["children"] == []


FUNCTIONS = """#!/bin/sh
step() { srun --overlap -N2 --ntasks-per-node=1 --kill-on-bad-exit=0 "$@"; }
count() { cat "$2"* 2> /dev/null | grep -c "$1"; }
named() { squeue --noheader --steps --jobs "$SLURM_JOB_ID" --format "%i %j" | grep -w "$1" | cut -d" " -f1; }
"""
BY_HAND = f"""{FUNCTIONS}
step --mpi=none "$MLFLASH" agent > hosts &
until [ "$(count "{READY}" hosts)" = 2 ]; do sleep 0.1; done
OUT=$PWD/out1 step --mpi=pmi2 "$PYTHON" "$TRAINER" "$DIES" &
until [ "$(count '"victim"' out1/rank)" = 2 ]; do sleep 0.1; done
OUT=$PWD/out1 step --mpi=none "$PYTHON" "$KILL_ALL"
wait $!
touch "out1/go on"
OUT=$PWD/out2 step --mpi=pmi2 "$PYTHON" "$TRAINER" "$RESTORES"
scancel --signal=TERM "$SLURM_JOB_ID.0"
wait
"""
BY_RUN = f"""{FUNCTIONS}
options="-N2 --ranks-per-node=1 --job=j --keep-memory --max-restarts=0"
OUT=$PWD/out1 "$MLFLASH" run $options "$PYTHON" "$TRAINER" "$DIES" &
until [ "$(count '"victim"' out1/rank)" = 2 ]; do sleep 0.1; done
OUT=$PWD/out1 step --mpi=none "$PYTHON" "$KILL_ALL"
touch "out1/go on"
wait $!
[ "$(squeue --noheader --steps --jobs "$SLURM_JOB_ID" --format "%j" | grep -c mlflash-)" = 0 ] || exit 9
OUT=$PWD/out2 "$MLFLASH" run $options "$PYTHON" "$TRAINER" "$RESTORES"
"""


@pytest.mark.parametrize("script", [BY_HAND, BY_RUN], ids=["by hand", "mlflash run"])
def test_couriers_of_another_step_commit_for_a_killed_one(slurm: Slurm, script: str) -> None:
    """Slurm kills a step with all that its tasks have started where it has cgroups; here `kill_all` does."""
    for name in ("out1", "out2"):
        (slurm.path / name).mkdir()
    settings = {"memory": "/dev/shm", "job": "j", "timeout_s": PATIENCE_S}
    env = {**NETMODS["ofi"], "OMP_NUM_THREADS": "1", "PYTHON": sys.executable,
           "MLFLASH": str(MLFLASH), "TRAINER": str(SUPPORT / "dying_trainer.py"),
           "KILL_ALL": str(Path(__file__).with_name("kill_all.py")),
           "DIES": json.dumps({"settings": settings, "who": "trainer", "how": "step killed"}),
           "RESTORES": json.dumps({"settings": settings})}  # fmt: skip
    job = slurm.sbatch(script, "--nodes=2", "--exclusive", env=env)
    job.wait("COMPLETED")
    restored = read_records(slurm.path / "out2", "restored")
    assert [(record["step"], record["same"]) for record in restored] == [(2, True)] * 2, job.output()
    for host in slurm.nodes.names:
        until(lambda host=host: not slurm.nodes.running(host, "mlflash.launch.agent"), f"no courier is left on {host}")


@pytest.mark.parametrize(("who", "how"), [("trainer", "killed"), ("trainer", "raises"), ("courier", "killed"),
                                          ("agent", "killed")])  # fmt: skip
def test_what_was_handed_over_under_srun_is_committed_and_nothing_is_left(slurm: Slurm, who: str, how: str) -> None:
    """As tests/programs/test_deaths.py has it under other launchers, with the two ranks on two nodes."""
    settings = {"memory": "/dev/shm", "job": f"{who}-{how}", "timeout_s": PATIENCE_S}
    two_nodes = ["-N2", "--nodelist=host1,host2", "--ntasks-per-node=1"]  # the same ones: that of memory

    def launch(name: str, **spec: Any) -> list[dict[str, Any]]:
        folder = slurm.path / name
        folder.mkdir()
        env = {**NETMODS["ofi"], "OMP_NUM_THREADS": "1", "OUT": str(folder)}
        command = [sys.executable, str(SUPPORT / "dying_trainer.py"), json.dumps({"settings": settings, **spec})]
        done = slurm.run("srun", *two_nodes, "--mpi=pmi2", *command, env=env, check=False)
        assert (done.returncode != 0) == (spec.get("who") == "trainer"), done.stdout + done.stderr
        return read_records(folder)

    told = launch(f"{who}-{how}", who=who, how=how)
    newest = 2 if who == "trainer" else next(record["steps"][-1] for record in told if record["event"] == "end")
    again = [record for record in launch(f"{who}-{how}-again") if record["event"] == "restored"]
    assert [(record["step"], record["same"]) for record in again] == [(newest, True)] * 2
    for host in slurm.nodes.names:
        until(lambda host=host: not slurm.nodes.running(host, "mlflash.launch.agent"), f"no courier is left on {host}")
        assert "mpich" not in slurm.nodes.run(host, "ls", "/dev/shm")


def test_one_torchrun_on_each_node_is_started_by_srun(slurm: Slurm) -> None:
    """Workers are torchrun's, and a second launch with other arguments, but the same name, goes on from memory."""
    env = {**NETMODS["ofi"], "OMP_NUM_THREADS": "1", "OUT": str(slurm.path),
           "PYTHON": sys.executable, "WORKER": str(SUPPORT / "elastic_worker.py")}  # fmt: skip
    script = """#!/bin/sh
export MLFLASH_JOB=slurm-$SLURM_JOB_ID
for last in 2 4; do
  srun --ntasks-per-node=1 --mpi=none "$PYTHON" -m torch.distributed.run --nnodes=2 --nproc-per-node=2 \\
    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID.$last" --rdzv-endpoint="$SLURMD_NODENAME:29500" \\
    "$WORKER" "{\\"last\\": $last}" || exit
done
"""
    job = slurm.sbatch(script, "--nodes=2", "--exclusive", env=env)
    job.wait("COMPLETED")
    restored = read_records(slurm.path, "restored")
    assert sorted((record["rank"], record["step"] or 0, record["same"]) for record in restored) == [
        (rank, step, True) for rank in range(4) for step in (0, 2)
    ], job.output()
    assert all(" ranks met by the store of torch.distributed)" in record["courier"] for record in restored)
    assert all(slurm.nodes.run(host, "ls", "/dev/shm/mlflash-0").startswith("slurm-") for host in ("host1", "host2"))
