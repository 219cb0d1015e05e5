"""A framework's own training on two nodes and a spare, from its shipped template; each rank notes its losses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from cluster.slurm.daemons import Slurm
from cluster.slurm.jobs import MPI_ENVIRONMENT, Job, written
from run_results import Results

from mlflash.run.processes import mpiexec

# The frameworks' own warnings are many.
ENV = {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}

Losses = dict[tuple[int, int], tuple[float, ...]]


def losses(out: Path, names: Sequence[str]) -> Losses:
    """Numbers of these names, by rank and step; of a step that was done twice the last."""
    found = {}
    for path in out.glob("rank*.jsonl"):
        for record in map(json.loads, path.read_text().splitlines()):
            if record["event"] == "loss":
                found[record["rank"], record["step"]] = tuple(record[name] for name in names)
    return found


def uninterrupted(out: Path, names: Sequence[str], last: int, script: Path, *arguments: str) -> Losses:
    """The numbers of a training on two ranks of this machine that nothing happens to."""
    start = "import sys; from mlflash.adapters.distributed import init_process_group; init_process_group(); "
    start += "sys.argv = sys.argv[1:]; import runpy; runpy.run_path(sys.argv[0], run_name='__main__')"
    program = [sys.executable, "-c", start, str(script), *arguments]
    line, env = mpiexec(2, program, {**ENV, "OUT": str(out)})
    subprocess.run(line, env=env, check=True, timeout=100, capture_output=True, cwd=out)  # not in the checkout
    found = losses(out, names)
    assert len(found) == 2 * last
    return found


class Training(Results):
    """A job from a template that starts the framework's own training. Numbers of these names are compared."""

    def __init__(self, slurm: Slurm, template: str, script: Path, arguments: Sequence[str], names: Sequence[str]):
        super().__init__(slurm.path / "out")
        self._slurm, self._names = slurm, names
        text = written(slurm, template, f'--journal "{self.out}/run.jsonl"', "--nodes", 2, "--spares", 1,
                       "--directory", slurm.path / "pfs", "--script", script, "--", *arguments)  # fmt: skip
        self.job: Job = slurm.sbatch(text, env={**MPI_ENVIRONMENT, **ENV, "OUT": str(self.out)})

    def log(self) -> str:
        return self.job.output()

    def steps(self) -> int:
        return max((step for _, step in losses(self.out, self._names)), default=0)

    def loses_a_node_and_ends_as(self, expected: Losses) -> None:
        """Crash a node of it; assert that it goes on from memory with the spare, and ends with the same numbers."""
        self._slurm.wait("20 steps", lambda: self.steps() >= 20, timeout=90)
        self._slurm.nodes.crash("host2")
        self.job.wait("COMPLETED", timeout=150)
        assert losses(self.out, self._names) == expected, self.log()
        starts = self.events("start")
        assert [event["hosts"] for event in starts] == [["host1", "host2"], ["host1", "host3"]]
        end = self.events("end")[-1]
        assert end["source"] == "memory" and end["restored"] >= 18, end
        finish = self.events("finish")[0]
        assert finish["scavenged"] is True and os.listdir(self._slurm.path / "pfs" / "mlflash")
