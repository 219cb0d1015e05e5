"""The entry point of couriers in tests/programs/test_wireup.py: does what its trainer asks, a JSON line at a time."""

from __future__ import annotations

import json
import os
import select
import sys
import threading
from pathlib import Path
from typing import Any

from waiting import hang

from mlflash.wireup.courier_process import Courier
from mlflash.wireup.mpich_segments import mapped_by


def serve(courier: Courier) -> None:
    from mpi4py import MPI

    MPI.Init_thread(MPI.THREAD_MULTIPLE)
    courier.tell_mpi_is_up()
    with courier.trainer.makefile("rw") as lines:
        for line in lines:
            command, *values = json.loads(line)
            if command == "end":
                break
            json.dump(do(courier, MPI, command, *values), lines)
            lines.write("\n")
            lines.flush()
    MPI.Finalize()


def do(courier: Courier, mpi: Any, command: str, *values: Any) -> object:
    if command == "sum":
        return [mpi.COMM_WORLD.rank, mpi.COMM_WORLD.size, mpi.COMM_WORLD.allreduce(values[0])]
    if command == "pass on":  # so many bytes, around
        rank, size, nbytes = mpi.COMM_WORLD.rank, mpi.COMM_WORLD.size, values[0]
        told, heard = bytearray([rank]) * nbytes, bytearray(nbytes)
        mpi.COMM_WORLD.Sendrecv(told, (rank + 1) % size, recvbuf=heard, source=(rank - 1) % size)
        return set(heard) == {(rank - 1) % size}
    if command == "describe":
        return {"segments": sorted(mapped_by("self")), "descriptors": len(os.listdir("/proc/self/fd")) - 1,
                "session": os.getsid(0), "beside": beside(mpi), "torch": "torch" in sys.modules,
                "environment": {**os.environ}}  # fmt: skip
    if command == "outlive":  # works until its trainer has gone, and a bit longer
        threading.Thread(target=outlive, args=(courier, Path(values[0])), daemon=True).start()
        return "works"
    if command == "barrier":  # what the others never come to
        mpi.COMM_WORLD.Barrier()
    if command == "abort":
        mpi.COMM_WORLD.Abort(values[0])
        hang()
    raise AssertionError(command)


def beside(mpi: Any) -> int:
    """How many ranks MPI takes to be on this node. Collective over the world."""
    node = mpi.COMM_WORLD.Split_type(mpi.COMM_TYPE_SHARED)
    size: int = node.size
    node.Free()
    return size


def outlive(courier: Courier, path: Path) -> None:
    select.select([courier.trainer_pidfd], [], [])
    path.write_text("finished")
    os._exit(0)


def before_mpi(courier: Courier) -> None:
    """Never comes to MPI_Init, so that the others wait in theirs."""
    select.select([courier.trainer], [], [])


def exits(courier: Courier) -> None:
    raise SystemExit(courier.rank + 3)


def raises(courier: Courier) -> None:
    raise ValueError("of the courier")


def speaks_no_pmi(courier: Courier) -> None:
    os.write(int(os.environ["PMI_FD"]), b"GET / HTTP/1.1\r\n")
    hang()


def alone(courier: Courier) -> None:
    """What the only rank of a job runs: it answers, and has no MPI."""
    with courier.trainer.makefile("rw") as lines:
        for line in lines:
            command, *values = json.loads(line)
            if command == "end":
                break
            has_mpi = courier.has_mpi or "PMI_FD" in os.environ or "mpi4py.MPI" in sys.modules
            lines.write(json.dumps([courier.rank, len(courier.nodes), "MPI" if has_mpi else values[0]]) + "\n")
            lines.flush()
