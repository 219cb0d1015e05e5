"""Rank program: save states of `states`, two steps of each job, or read them again in a new process.

Usage: states_worker.py save|read PICKLE, which holds for each job its two steps, and for each of these a description
per rank.
"""

from __future__ import annotations

import pickle
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from meeting import COMM
from records import OUT, note
from states import Built, differences, untied

from mlflash import Checkpointer
from mlflash.errors import MlflashError, StateError

RANK = COMM.rank


def save(ckpt: Checkpointer, job: int, steps: Any) -> None:
    for step, specs in enumerate(steps, start=1):
        built, refused, wrong = Built(specs[RANK]), "", ""
        try:
            snapshot = ckpt.save(step, built.state)
            try:
                snapshot.wait()
            except MlflashError as error:  # another rank has refused its own
                refused, wrong = ("elsewhere", "") if error.rank == 1 - RANK else ("", str(error))
        except StateError as error:
            refused = str(error.tensor)
            wrong = "" if refused in built.doubtful and error.rank == RANK else str(error)
        ckpt.wait()
        note("saved", RANK, job=job, step=step, refused=refused, wrong=wrong)


def read(ckpt: Checkpointer, job: int, steps: Any) -> None:
    there = ckpt.steps()
    for step, specs in enumerate(steps, start=1):
        if step in there:
            state = Built(specs[RANK]).state
            loaded = ckpt.load(step=step)[1]
            wrong = differences(state, loaded, "load", loaded=True)
            wrong += [] if wrong else untied(state, loaded)
            blank = Built(specs[RANK], blank=True).state
            ckpt.restore(blank, step=step)
            wrong += differences(state, blank, "restore", loaded=False)
            note("read", RANK, job=job, step=step, wrong="\n".join(wrong))


def main() -> None:
    warnings.filterwarnings("ignore", message="step .* was not saved")
    note("start", RANK)
    task, path = sys.argv[1:]
    store = torch.distributed.FileStore(str(OUT / "store"), COMM.size)  # DTensors are on meshes of these ranks
    torch.distributed.init_process_group("gloo", store=store, rank=RANK, world_size=COMM.size)
    for job, steps in enumerate(pickle.loads(Path(path).read_bytes())):
        with Checkpointer(job=f"j{job}", timeout_s=30.0) as ckpt:
            (save if task == "save" else read)(ckpt, job, steps)
    note("end", RANK)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
