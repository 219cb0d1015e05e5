"""The Slurm part of docs/quickstart.md, its commands as they stand: what `mlflash template` wrote is not edited."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from cluster.slurm.daemons import Slurm
from cluster.slurm.jobs import MPI_ENVIRONMENT

PAGE = (Path(__file__).parents[3] / "docs" / "quickstart.md").read_text()


@pytest.mark.timeout(200)  # what it runs may take 150 s
def test_a_written_template_runs_as_it_is_through_a_kill(slurm: Slurm) -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE.partition("\n## Under Slurm\n")[2], re.M | re.S)
    assert len(blocks) == 4 and not any(word in block for block in blocks[1:] for word in ("sed", "pmi2"))
    here = f'export PATH="{Path(sys.executable).parent}:$PATH"\n'  # as `. flash/bin/activate` has it
    script = "".join([f"cd {slurm.path}\n", here, "set -ex\n", *blocks])
    env = {**MPI_ENVIRONMENT, "OMP_NUM_THREADS": "1"}
    done = slurm.run("timeout", "150", "bash", "-c", script, env=env, timeout=160, check=False)
    folder = slurm.path / "slurm-job"
    printed = "".join(path.read_text(errors="replace") for path in folder.glob("*.out"))  # slurmstepd quotes at will
    shown = f"{done.stdout}{done.stderr}\n{printed}\n{slurm.logs()}"
    assert done.returncode == 0, shown
    begins = [int(step) for step in re.findall(r"begins after step (\d+)", printed)]
    assert len(begins) == 2 and begins[0] == 0 and begins[1] >= 55, shown
    events = [json.loads(line) for line in (folder / "train-checkpoints" / "run.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events][:3] == ["start", "end", "start"], shown
    assert all(event["hosts"] == ["host1", "host2"] for event in events if event["event"] == "start"), shown
    found = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", (folder / "train.sbatch").read_text(), re.M))
    assert (found["nodes"], found["ntasks-per-node"], found["time"]) == ("3", "1", "10"), found
    assert not {"account", "partition", "gpus-per-node"} & found.keys(), "what was not given was said"
