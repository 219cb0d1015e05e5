"""Lost ranks of `mlflash run --keep-alive`: one whose couriers cannot be started any more, and a killed one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import needs
from waiting import PATIENCE_S

from mlflash.courier import main

pytestmark = needs.MPI
TRAIN = """
import os, pathlib, signal, sys
import numpy as np
import mlflash
from mlflash.channel import connection
from mlflash.launch.agent_client import AgentRefused
from mlflash.launch.couriers import Couriers

LAST, OUT = 30, pathlib.Path(sys.argv[1])
state = {"w": np.zeros(1000), "step": 0}


def lose_the_courier():
    def refuse(*_):
        raise AgentRefused("it cannot fork")

    Couriers.next_epoch = refuse
    os.kill(connection._connections[0].couriers.courier.pid, signal.SIGKILL)


def train(ckpt, step):
    rank = int(os.environ["RANK"])
    for step in range(step + 1, LAST + 1):
        if (rank, step) == (1, 5) and not (OUT / "doomed").exists():
            (OUT / "doomed").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL) if sys.argv[2] == "killed" else lose_the_courier()
        state["w"] += step
        state["step"] = step
        try:
            ckpt.save(step, state).wait()
        except mlflash.errors.SaveFailed:  # a courier is started anew
            pass
    while not ckpt.save(LAST + 1, state).wait().committed:
        pass
    return ckpt.steps()


steps = mlflash.keep_alive(train, state, timeout_s=30.0, redundancy="copy")
(OUT / f"end-{os.environ['RANK']}").write_text(f"{os.getpid()} {state['w'][0]:g} {steps[-1]}")
"""


def run(shm: Path, folder: Path, how: str) -> str:
    """Let a run lose rank 1 and come to its end; return what it printed."""
    script = folder / "train.py"
    script.write_text(TRAIN)
    options = ["-N", "1", "--ranks-per-node", "2", "--keep-alive", "--spares", "1", "--job", "kept"]
    words = ["run", *options, "--", "python", script, folder, how]
    env = {**os.environ, "MLFLASH_MEMORY": str(shm), "OMP_NUM_THREADS": "1",
           "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}  # fmt: skip
    done = subprocess.run([sys.executable, "-m", "mlflash", *map(str, words)], cwd=folder, env=env, text=True,
                          capture_output=True, timeout=2 * PATIENCE_S, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    ends = [(folder / f"end-{rank}").read_text().split() for rank in range(2)]
    assert [end[1:] for end in ends] == [["465", "31"]] * 2
    assert ends[1][0] != (folder / "doomed").read_text()
    return done.stderr


def test_a_rank_whose_couriers_cannot_be_started_is_replaced(shm: Path, tmp_path: Path) -> None:
    said = run(shm, tmp_path, "cannot start couriers")
    assert "This process ends, and another one takes rank 1" in said
    assert "rank 1 was lost (its process ended with code 1); all train on after step" in said


def test_a_killed_rank_is_replaced_before_any_courier_of_the_last_round_would_end_by_itself(
    shm: Path, tmp_path: Path
) -> None:
    said = run(shm, tmp_path, "killed")
    (seconds,) = re.findall(r"rank 1 was lost \(.* signal 9\); all train on after step \d+, ([\d.]+) s later", said)
    assert float(seconds) < main.ORPHAN_S
