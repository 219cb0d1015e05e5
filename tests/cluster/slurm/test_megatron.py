"""Megatron-LM's own training, from the shipped template, loses a node of a real Slurm and ends with the same losses."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from cluster.slurm.daemons import Slurm
from cluster.slurm.jobs import MPI_ENVIRONMENT, Job, written
from harness import SUPPORT, read_records
from processes import ran
from run_results import Results

from mlflash.run.processes import mpiexec

LAST = 40
SCRIPT = SUPPORT / "megatron_pretrain.py"
FLAGS = f"--use-distributed-optimizer --global-batch-size 4 --exit-interval {LAST}"
ENV = {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}  # Megatron's own warnings are many
Losses = dict[tuple[int, int], tuple[float, float]]


def losses(out: Path) -> Losses:
    """Loss and gradient norm, by rank and step; of a step that was done twice the last."""
    return {(r["rank"], r["step"]): (r["loss"], r["norm"]) for r in read_records(out, "loss")}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Losses:
    """Those of a training on two ranks of this machine that nothing happens to."""
    out = tmp_path_factory.mktemp("uninterrupted")
    start = "import sys; from mlflash.adapters.distributed import init_process_group; init_process_group(); "
    start += "sys.argv = sys.argv[1:]; import runpy; runpy.run_path(sys.argv[0], run_name='__main__')"
    program = [sys.executable, "-c", start, str(SCRIPT), *FLAGS.split()]
    line, env = mpiexec(2, program, {**ENV, "OUT": str(out)})
    ran(*line, env=env, timeout=100, cwd=out)
    assert len(losses(out)) == 2 * LAST
    return losses(out)


class Training(Results):
    """A job from the template that starts Megatron's own training, on two nodes and a spare."""

    def __init__(self, slurm: Slurm):
        super().__init__(slurm.path / "out")
        # The template says 20; what is said last holds.
        flags = [*FLAGS.split(), "--non-persistent-save-interval", "2"]
        text = written(slurm, "megatron", f'--journal "{self.out}/run.jsonl"', "--nodes", 2, "--spares", 1,
                       "--directory", slurm.path / "pfs", "--script", SCRIPT, "--", *flags)  # fmt: skip
        self.job: Job = slurm.sbatch(text, env={**MPI_ENVIRONMENT, **ENV, "OUT": str(self.out)})

    def log(self) -> str:
        return self.job.output()


@pytest.mark.timeout(300)
def test_megatron_loses_a_node_and_goes_on_with_a_spare(slurm: Slurm, expected: Losses) -> None:
    training = Training(slurm)
    slurm.wait("20 steps", lambda: max((step for _, step in losses(training.out)), default=0) >= 20, timeout=90)
    slurm.nodes.crash("host2")
    training.job.wait("COMPLETED", timeout=150)
    assert losses(training.out) == expected, training.log()
    assert [event["hosts"] for event in training.events("start")] == [["host1", "host2"], ["host1", "host3"]]
    end = training.events("end")[-1]
    assert end["source"] == "memory" and end["restored"] >= 18, end
    assert training.events("finish")[0]["scavenged"] is True and os.listdir(slurm.path / "pfs" / "mlflash")
