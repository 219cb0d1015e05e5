"""Rank programs for tests that kill and relaunch: a "training" whose state is known for every rank and step.

It uses numpy only, so that a rank starts in a fraction of a second.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import mpi4py
import numpy as np

if os.environ.get("THREAD_LEVEL"):
    mpi4py.rc.thread_level = os.environ["THREAD_LEVEL"]

from mpi4py import MPI

import mlflash

COMM = MPI.COMM_WORLD
RANK = COMM.rank
OUT = Path(os.environ["OUT"])


def note(event: str, **fields: object) -> None:
    """Write one record, so that it is there even if this process is killed in the next instant."""
    with (OUT / f"rank{RANK}.jsonl").open("a") as file:
        file.write(json.dumps({"event": event, "rank": RANK, "pid": os.getpid(), **fields}) + "\n")


def state_at(rank: int, step: int, nbytes: int) -> dict[str, object]:
    """The state that a rank has after a step; another one for every rank and step."""
    random = np.random.default_rng((rank, step))
    return {
        "weights": random.integers(0, 256, nbytes, dtype=np.uint8),
        "moments": [random.standard_normal(1000 + rank), random.standard_normal((3, 5)).astype(np.float32)],
        "lr": 1 / (1 + step),
        "history": [rank, step, f"step {step}", None, b"\x00\xff", (True, float("inf"))],
    }


def differences(found: object, expected: object, path: str = "") -> list[str]:
    """Where two states differ, bit for bit."""
    if isinstance(expected, np.ndarray):
        same = isinstance(found, np.ndarray) and found.dtype == expected.dtype and np.array_equal(found, expected)
        return [] if same else [path]
    if isinstance(expected, dict):
        return [d for k, v in expected.items() for d in differences(found[k], v, f"{path}.{k}")]
    if isinstance(expected, (list, tuple)):
        pairs = zip(found, expected, strict=True)
        return [d for i, (a, b) in enumerate(pairs) for d in differences(a, b, f"{path}.{i}")]
    return [] if type(found) is type(expected) and found == expected else [path]


def update(state: dict[str, object], new: dict[str, object]) -> None:
    """Train: change every leaf in place."""
    state["weights"][:] = new["weights"]
    for old, fresh in zip(state["moments"], new["moments"], strict=True):
        old[:] = fresh
    state["lr"], state["history"] = new["lr"], new["history"]


def kill_my_node(wipe: bool) -> None:
    """Die with all ranks of this emulated node, and with its memory."""
    per_node = int(os.environ["MLFLASH_RANKS_PER_NODE"])
    node = RANK // per_node
    root = Path(os.environ["MLFLASH_MEMORY"], f"mlflash-{os.getuid()}", os.environ["MLFLASH_JOB"])
    ranks = [r for r in range(COMM.size) if r // per_node == node and r != RANK]
    for rank in ranks:
        record = json.loads((OUT / f"rank{rank}.jsonl").read_text().splitlines()[0])
        os.kill(record["pid"], signal.SIGKILL)
    if wipe:
        shutil.rmtree(root / f"node{node}")
    os.kill(os.getpid(), signal.SIGKILL)


def train(last: int, nbytes: int = 300_000, die_at: int = -1, die_rank: int = -1, die: str = "", busy: bool = False,
          pause: float = 0.0, big_rank: int = -1, big_nbytes: int = 0,
          options: dict[str, object] | None = None) -> None:  # fmt: skip
    """Restore, check the bits, train to the last step with a save after each, and perhaps die.

    Args:
        die: "committed": in the moment the snapshot is committed; "saved": right after save() returned;
            "all": all ranks end without a word once the step is committed.
    """
    nbytes = big_nbytes if big_rank == RANK else nbytes + 1000 * RANK  # slots of different sizes
    state = state_at(RANK, 0, nbytes)
    with mlflash.Checkpointer(strict=True, **(options or {})) as ckpt:
        start = ckpt.restore(state)
        wrong = differences(state, state_at(RANK, start or 0, nbytes))
        note("restored", step=start, wrong=wrong, report=ckpt.report())
        pending: list[mlflash.Snapshot] = []
        for step in range((start or 0) + 1, last + 1):
            update(state, state_at(RANK, step, nbytes))
            snapshot = ckpt.save(step, state)
            update(state, state_at(RANK, step + 1000, nbytes))  # at once, as the promise says
            if step == die_at and die == "saved" and die_rank == RANK:
                kill_my_node(wipe=True)
            if step == die_at and die == "committed" and die_rank == RANK:
                while not snapshot.committed:
                    if busy:
                        np.dot(np.ones((200, 200)), np.ones((200, 200)))
                kill_my_node(wipe=True)
            if step == die_at and die == "all":
                snapshot.wait()
                note("committed", step=step)
                COMM.Barrier()
                os.kill(os.getpid(), signal.SIGKILL)
            if pause:
                end = time.monotonic() + pause
                while time.monotonic() < end:
                    np.dot(np.ones((100, 100)), np.ones((100, 100)))
            pending.append(snapshot)
            for committed in [s for s in pending if s.committed]:
                note("committed", step=committed.step)
                pending.remove(committed)
        ckpt.wait()
        steps = ckpt.steps()
        note("end", steps=steps, report=ckpt.report())


def wait_past_deadline(stop_s: float) -> None:
    """Rank 0 saves while the last rank is stopped from outside: the wait ends, training goes on, and it catches up."""
    state = state_at(RANK, 1, 100_000)
    with mlflash.Checkpointer(timeout_s=stop_s) as ckpt:
        ckpt.save(1, state).wait()
        note("ready")
        if COMM.size - 1 == RANK:
            while not (OUT / "stopped").exists():
                time.sleep(0.01)
            time.sleep(0.5)  # SIGSTOP comes here
        else:
            while not (OUT / "stopped").exists():
                time.sleep(0.01)
        started = time.monotonic()
        late = ckpt.save(2, state)
        try:
            late.wait()
        except mlflash.errors.DeadlineExceeded as error:
            note("late", text=str(error), ranks=error.ranks, nodes=error.nodes, seconds=time.monotonic() - started)
        started = time.monotonic()
        next_one = ckpt.save(3, state)
        note("next", seconds=time.monotonic() - started, error=str(next_one.error))
        if RANK == 0:
            (OUT / "go on").touch()
        end = time.monotonic() + 30
        while not (late.committed and next_one.done) and time.monotonic() < end:
            time.sleep(0.01)
        note("caught up", late=late.committed, next=next_one.committed)
        ckpt.save(4, state).wait()
        note("end", steps=ckpt.steps())


def inline() -> None:
    """Without MPI_THREAD_MULTIPLE everything happens inside save()."""
    assert MPI.Query_thread() < MPI.THREAD_MULTIPLE
    state = state_at(RANK, 0, 100_000)
    with mlflash.Checkpointer() as ckpt:
        start = ckpt.restore(state)
        note("restored", step=start, wrong=differences(state, state_at(RANK, start or 0, 100_000)))
        for step in range((start or 0) + 1, (start or 0) + 4):
            update(state, state_at(RANK, step, 100_000))
            assert ckpt.save(step, state).committed
        note("end", steps=ckpt.steps())


def leave_by_exception() -> None:
    """One rank leaves the with block by an exception in the middle of a save."""
    state = state_at(RANK, 1, 3_000_000)
    with mlflash.Checkpointer() as ckpt:
        ckpt.save(1, state).wait()
        note("committed", step=1)
        COMM.Barrier()
        ckpt.save(2, state)
        if COMM.size - 1 == RANK:
            note("raised", at=time.time())
            raise RuntimeError("training went wrong")
        time.sleep(60)


if __name__ == "__main__":
    note("start")
    spec = json.loads(sys.argv[1])
    globals()[spec.pop("program", "train")](**spec)
