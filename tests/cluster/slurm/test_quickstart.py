"""The Slurm part of docs/quickstart.md, its files and commands as they stand."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from cluster.slurm.daemons import Slurm
from cluster.slurm.jobs import MPI_ENVIRONMENT, PMI

PAGE = (Path(__file__).parents[3] / "docs" / "quickstart.md").read_text()


@pytest.mark.timeout(200)  # what it runs may take 150 s
def test_a_rank_is_killed_and_the_job_goes_on_from_memory(slurm: Slurm) -> None:
    (training,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    (batch,) = re.findall(r"^```bash\n(.*?)^```", PAGE, re.M | re.S)
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE.partition("\n## Under Slurm\n")[2], re.M | re.S)
    assert ". flash/bin/activate\n" in batch and len(blocks) == 3
    here = f'export PATH="{Path(sys.executable).parent}:$PATH"\n'
    (slurm.path / "train.py").write_text(training)
    # What another site has to change: where Python is, the flag of its MPI, the partition.
    (slurm.path / "quick.sbatch").write_text(batch.replace(". flash/bin/activate\n", here).replace("pmi2", PMI))
    script = "".join([f"cd {slurm.path}\n", here, "set -ex\n", *(block.replace("pmi2", PMI) for block in blocks)])
    env = {**MPI_ENVIRONMENT, "OMP_NUM_THREADS": "1"}
    done = slurm.run("timeout", "150", "bash", "-c", script, env=env, timeout=160, check=False)
    output = slurm.path / "quick.out"
    printed = output.read_text(errors="replace") if output.exists() else ""  # slurmstepd quotes what it does not know
    shown = f"{done.stdout}{done.stderr}\n{printed}\n{slurm.logs()}"
    assert done.returncode == 0, shown
    begins = [int(step) for step in re.findall(r"begins after step (\d+)", printed)]
    assert len(begins) == 2 and begins[0] == 0 and begins[1] >= 55, shown
    events = [json.loads(line) for line in (slurm.path / "run.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events][:3] == ["start", "end", "start"], shown
