"""Blocks of a page, one after the other in one launch: each is run as it stands, and what it has at its end is noted.

    mpiexec -n 2 python page_job.py '[{"script": "ddp.py", "job": "ddp", "stop": 12}]'

Where a block has a step to stop at, its last rank waits there to be killed, in the middle of the step.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from digests import digests
from records import OUT, note
from torch.optim.optimizer import register_optimizer_step_pre_hook
from waiting import hang

from mlflash.launch.launcher_variables import launched

RANK, SIZE = launched(os.environ).rank, launched(os.environ).size


def holds_state(value: Any) -> bool:
    return isinstance(value, (dict, torch.Tensor)) or (hasattr(value, "state_dict") and not isinstance(value, type))


def run(script: str, job: str, stop: int | None) -> None:
    """Run a block as the job of this name."""
    os.environ["MLFLASH_JOB"] = job
    random.seed(0)  # a process begins with others
    np.random.seed(0)
    names: dict[str, Any] = {"__name__": "__main__"}

    def look(*_: object) -> None:
        step = names["step"]
        if "x" in names:  # a block about data
            note("step", case=job, step=step, weights=digests(names["model"]), x=names["x"].tolist())
        if step == stop and RANK == SIZE - 1:
            note("middle", case=job)
            hang()

    hook = register_optimizer_step_pre_hook(look)
    exec(compile(Path(script).read_text(), script, "exec"), names)
    hook.remove()
    public = {name: value for name, value in names.items() if not name.startswith("_")}
    left = {name: digests(value) for name, value in public.items() if holds_state(value)}  # more than is in the state
    note("ended", RANK, case=job, first=names["first"], last=names["step"], left=left)


if __name__ == "__main__":
    os.chdir(OUT)
    note("start", RANK)
    for block in json.loads(sys.argv[1]):
        run(**block)
