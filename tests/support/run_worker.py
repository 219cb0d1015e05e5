"""A training for tests of `mlflash run`: ranks add up what they have, so that each step depends on all before it.

Usage: run_worker.py DIRECTORY OUT LAST [JSON]. Each rank writes a digest of its final state to OUT. JSON: ``pause``
seconds a step; the step at which rank 1 hangs (``hang_at``) or fails (``fail_at``), in the first run only; or where it
fails in each run (``always``); the step that the first run does not begin before there is a file "go on" (``hold_at``).
Ranks add up over a connection to rank 0 at MASTER_PORT; none uses MPI itself.
"""

from __future__ import annotations

import json
import os
import sys
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

import numpy as np
import xxhash
from waiting import hang, take, until

import mlflash


class Sums:
    def __init__(self) -> None:
        self.rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._others: list[Connection] = []
        main = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        if self.rank:
            self._others = [until(lambda: self._reach(main), f"rank 0 at {main}")]
            self._others[0].send(self.rank)
        elif size > 1:
            with Listener(("", main[1])) as listener:
                accepted = [listener.accept() for _ in range(1, size)]
            self._others = [peer for _, peer in sorted((peer.recv(), peer) for peer in accepted)]

    @staticmethod
    def _reach(main: tuple[str, int]) -> Connection | None:
        try:
            return Client(main)
        except ConnectionRefusedError:
            return None

    def allreduce(self, own: float) -> float:
        if self.rank:
            self._others[0].send(own)
            return float(self._others[0].recv())
        total = sum((other.recv() for other in self._others), own)
        for other in self._others:
            other.send(total)
        return total


COMM = Sums()


def main() -> None:
    directory, out, last = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    options = json.loads(sys.argv[4]) if len(sys.argv) > 4 else {}
    state = {"weights": np.random.default_rng(COMM.rank).standard_normal(20_000), "sums": np.zeros(50)}
    with mlflash.Checkpointer(directory, **options.get("settings", {})) as ckpt:
        start = ckpt.restore(state) or 0
        first = once(out / f"ran{COMM.rank}")
        for step in range(start + 1, last + 1):
            if first and step == options.get("hold_at"):
                until((out / "go on").exists, "the test to say go on")
            if COMM.rank == 1 and first and step == options.get("hang_at"):
                hang()
            if COMM.rank == 1 and (first or options.get("always")) and step == options.get("fail_at"):
                sys.exit(7)
            total = COMM.allreduce(float(state["weights"].sum()))
            state["weights"] *= 1 + 1e-9 * total
            state["sums"][step % 50] = total
            ckpt.save(step, state)
            (out / f"step{COMM.rank}").write_text(str(step))
            take(options.get("pause", 0.0))
        ckpt.wait()
    digest = xxhash.xxh3_64_hexdigest(state["weights"].tobytes() + state["sums"].tobytes())
    (out / f"end{COMM.rank}").write_text(json.dumps({"digest": digest, "start": start, "node": os.uname().nodename}))


def once(path: Path) -> bool:
    """Whether nobody was here before."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


if __name__ == "__main__":
    main()
