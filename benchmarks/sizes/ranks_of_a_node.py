"""The program of each of eight ranks that share one node or two: all ranks save and do a memcpy at the same time."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from bench.clock import Action, Bench, cpu
from bench.rows import row
from bench.states import Saver, bytes_of, change, large_state
from bench.yardsticks import Yardsticks, both
from mpi4py import MPI


def main() -> None:
    out, memory, nbytes, repetitions = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    bench = Bench(MPI.COMM_WORLD, out, memory, repetitions, warm_up=1)
    nodes = bench.comm.size // int(os.environ["MLFLASH_RANKS_PER_NODE"])
    redundancy = "none" if nodes == 1 else "copy"
    state = large_state(nbytes)
    beside = Yardsticks(bench.comm, memory, nbytes)
    with bench.job("many") as job, bench.checkpointer(job, redundancy=redundancy) as ckpt:
        ckpt.prepare(state)
        actions: dict[str, Action] = {**beside.of(bytes_of(state)), "save": Saver(ckpt, state)}
        samples = bench.repeat(actions, before=lambda: change(state))
    where = "one node" if nodes == 1 else f"{nodes} nodes"
    case = f"{bench.comm.size} ranks of {nbytes >> 20} MiB on {where}, {redundancy}, {os.cpu_count()} cores in all"
    bench.rows(
        row("stall", samples["stall"], both(samples), "stall", case=case),
        row("committed", samples["save"], both(samples), "" if nodes == 1 else "committed", case=case),
        row("CPU seconds", cpu(samples)["save"], both(cpu(samples)), "cpu" if nodes == 1 else "", case=case),
    )
    beside.free()


if __name__ == "__main__":
    main()
