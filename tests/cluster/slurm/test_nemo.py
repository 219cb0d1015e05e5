"""NeMo's training, from the shipped template, loses a node of a real Slurm and ends with the same losses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cluster.slurm.daemons import Slurm
from cluster.slurm.jobs import MPI_ENVIRONMENT, PMI, Job, edited
from run_results import Results

from mlflash.demo.launch import mpiexec

LAST = 60
TESTS = Path(__file__).parents[2]
# NeMo's own warnings are many.
ENV = {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)}

Losses = dict[tuple[int, int], float]


def losses(out: Path) -> Losses:
    """Loss of each rank and step; of a step that was done twice the last."""
    found = {}
    for path in out.glob("rank*.jsonl"):
        for record in map(json.loads, path.read_text().splitlines()):
            if record["event"] == "loss":
                found[record["rank"], record["step"]] = record["loss"]
    return found


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Losses:
    out = tmp_path_factory.mktemp("uninterrupted")
    start = "import sys; from mlflash.adapters.distributed import init_process_group; init_process_group(); "
    start += "sys.argv = sys.argv[1:]; import runpy; runpy.run_path(sys.argv[0], run_name='__main__')"
    script = [str(TESTS / "nemo_pretrain.py"), "--log-dir", str(out), "--last", str(LAST)]
    program = [sys.executable, "-m", "mpi4py", "-c", start, *script]
    line, env = mpiexec(2, program, {**ENV, "OUT": str(out)})
    subprocess.run(line, env=env, check=True, timeout=100, capture_output=True, cwd=out)  # not in the checkout
    found = losses(out)
    assert len(found) == 2 * LAST
    return found


class Training(Results):
    """A job from nemo.sbatch."""

    def __init__(self, slurm: Slurm):
        super().__init__(slurm.path / "out")
        script = f'python -m mpi4py -c "$start" {TESTS}/nemo_pretrain.py --log-dir "$directory" --flash "$flash"'
        text = edited("nemo.sbatch", {
            "#SBATCH --account": "", "#SBATCH --partition": "#SBATCH --partition=main", "#SBATCH --gpus": "",
            "#SBATCH --nodes": "#SBATCH --nodes=3", "#SBATCH --ntasks": "#SBATCH --ntasks-per-node=1",
            "#SBATCH --cpus": "#SBATCH --cpus-per-task=1", "#SBATCH --time": "#SBATCH --time=00:10:00",
            "export PATH": f'export PATH="{Path(sys.executable).parent}:$PATH"', "mpi=": f"mpi={PMI}",
            "srun_args=": 'srun_args=""', "--no-container": "", "directory=": f"directory={slurm.path}/pfs",
            "training=": f"training=({script} --last {LAST})",
            "--nodes 8": "--nodes 2", "--spares 1": "--spares 1 --look-every 3", "--gpus 8": "",
            "--journal": f"--journal {self.out}/run.jsonl",
        })  # fmt: skip
        self.job: Job = slurm.sbatch(text, env={**MPI_ENVIRONMENT, **ENV, "OUT": str(self.out)})

    def log(self) -> str:
        return self.job.output()

    def steps(self) -> int:
        return max((step for _, step in losses(self.out)), default=0)


@pytest.mark.timeout(300)
def test_nemo_loses_a_node_and_goes_on_with_a_spare(slurm: Slurm, expected: Losses) -> None:
    training = Training(slurm)
    slurm.wait("20 steps", lambda: training.steps() >= 20, timeout=90)
    slurm.nodes.crash("host2")
    training.job.wait("COMPLETED", timeout=150)
    found: dict[Any, Any] = losses(training.out)
    assert found == expected, training.log()
    starts = training.events("start")
    assert [event["hosts"] for event in starts] == [["host1", "host2"], ["host1", "host3"]]
    end = training.events("end")[-1]
    assert end["source"] == "memory" and end["restored"] >= 18, end
    assert training.events("finish")[0]["scavenged"] is True and os.listdir(slurm.path / "pfs" / "mlflash")
