"""One rank of memory_of_ranks.py: it reports the memory of its processes after each step."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

FIELDS = ("Pss", "Pss_Anon", "Pss_File", "Pss_Shmem", "Private_Clean", "Private_Dirty")
_WAIT_S = 120.0
_LIKE_OURS = 3  # communicators of all ranks, as in mlflash; the node, the first ranks and the group add one each


def memory_of(pid: int) -> dict[str, int]:
    """Give KiB of a process by the kernel's names, and "Private", and the numbers of threads and descriptors."""
    process = Path("/proc", str(pid))
    found = dict.fromkeys(FIELDS, 0)
    for line in (process / "smaps_rollup").read_text().splitlines()[1:]:
        name, _, rest = line.partition(":")
        if name in found:
            found[name] = int(rest.split()[0])
    threads = len(list((process / "task").iterdir()))
    descriptors = len(list((process / "fd").iterdir())) - (pid == os.getpid())
    private = found["Private_Clean"] + found["Private_Dirty"]
    return {**found, "Private": private, "threads": threads, "descriptors": descriptors}


def children_of(pid: int) -> list[int]:
    """Give the live child processes of a process."""
    tasks = Path("/proc", str(pid), "task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


class Notes:
    """Writes the memory of this rank's processes after each stage, as lines of JSON in one file of all ranks."""

    def __init__(self, out: str, kind: str, rank: int, size: int):
        self._out, self._about = out, {"kind": kind, "rank": rank, "ranks": size}

    def take(self, stage: str) -> None:
        """Write a line for the trainer, and for zygote and courier if they exist."""
        processes = {"trainer": os.getpid()}
        for name in ("zygote", "courier"):
            for child in children_of([*processes.values()][-1])[:1]:
                processes[name] = child
        lines = [{**self._about, "stage": stage, "process": name, **memory_of(pid)} for name, pid in processes.items()]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        descriptor = os.open(self._out, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(descriptor, text.encode())
        os.close(descriptor)


def with_mlflash(notes: Notes, memory: str, courier: str) -> None:
    """Create a Checkpointer, save a state of 4 KiB, and restore it."""
    import numpy as np

    notes.take("before mlflash")
    import mlflash

    state = {"weights": np.ones(1024, np.float32)}
    with mlflash.Checkpointer(courier=courier, memory=memory, job="memory", redundancy="copy", strict=True,
                              timeout_s=_WAIT_S) as ckpt:  # fmt: skip
        together = ckpt.adapting.ranks
        together.agree([0])
        notes.take("Checkpointer")
        together.agree([0])
        ckpt.save(1, state).wait()
        together.agree([0])
        notes.take("save")
        together.agree([0])
        assert ckpt.restore(state) == 1
        together.agree([0])
        notes.take("restore")
        together.agree([0])


def with_mpi_alone(notes: Notes) -> None:
    """Start couriers that only create the communicators of ours, and do one allreduce and one message."""
    import numpy  # noqa: F401

    notes.take("before mlflash")
    from mlflash.wireup.launch import Couriers

    node = int(os.environ["PMI_RANK"]) // int(os.environ["MLFLASH_RANKS_PER_NODE"])
    couriers = Couriers("scale.memory_rank:bare", os.environ, _WAIT_S, node=node)
    try:
        couriers.wait_up(_WAIT_S)
        couriers.courier.trainer.settimeout(_WAIT_S)
        with couriers.courier.trainer.makefile("rw") as lines:
            while (stage := lines.readline().strip()) != "end":
                notes.take(stage)
                lines.write("\n")
                lines.flush()
    finally:
        couriers.close()


def bare(courier: Any) -> None:
    """Run as a bare courier."""
    import numpy as np
    from mpi4py import MPI

    MPI.Init_thread(MPI.THREAD_MULTIPLE)
    courier.tell_mpi_is_up()
    comm, told, found = MPI.COMM_WORLD, np.zeros(1, np.int64), np.zeros(1, np.int64)
    courier.trainer.settimeout(_WAIT_S)
    with courier.trainer.makefile("rw") as lines:

        def say(stage: str) -> None:
            comm.Barrier()
            lines.write(stage + "\n")
            lines.flush()
            if stage != "end":
                lines.readline()

        say("MPI_Init, a barrier")
        made = [comm.Dup() for _ in range(_LIKE_OURS)]
        made += [comm.Split(comm.rank, comm.rank), comm.Split(0, comm.rank), comm.Split(comm.rank // 2, comm.rank)]
        made[0].Allreduce(told, found, MPI.MIN)
        made[1].Sendrecv(told, (comm.rank + 1) % comm.size, recvbuf=found, source=(comm.rank - 1) % comm.size)
        say("communicators, a message")
        say("end")
    MPI.Finalize()


def main() -> None:
    out, memory, kind = sys.argv[1:]
    notes = Notes(out, kind, int(os.environ["PMI_RANK"]), int(os.environ["PMI_SIZE"]))
    if kind == "bare":
        with_mpi_alone(notes)
    else:
        with_mlflash(notes, memory, kind)


if __name__ == "__main__":
    main()
