"""The job that the pictures show: a rank that computes, saves and drains. `pictures.py` starts it.

Usage: python -m mpi4py pictured_job.py STEPS FOLDER
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

import mlflash

STEP_S, EVERY, LAYERS, NBYTES = 0.05, 20, 8, 4 << 20


def main() -> None:
    """Train to a step. A file of each rank says who it is, for who wants to kill it."""
    steps, folder = int(sys.argv[1]), Path(sys.argv[2])
    (folder / f"pid-{MPI.COMM_WORLD.rank}").write_text(str(os.getpid()))
    state = {f"layer{number}": np.zeros(NBYTES // 8) for number in range(LAYERS)}
    with mlflash.Checkpointer("run42", log="events.jsonl", drain_every=12) as ckpt:
        start = ckpt.restore(state) or 0
        for step in range(start + 1, steps + 1):
            time.sleep(STEP_S)  # where the GPUs would be at work
            state[f"layer{step % LAYERS}"] += 1
            if step % EVERY == 0:
                ckpt.save(step, state)
        ckpt.wait()


if __name__ == "__main__":
    main()
