"""Entry points of couriers in tests: each does what its trainer asks, a JSON line at a time."""

from __future__ import annotations

import json
import select
from typing import Any

from mlflash.launch.courier_process import Courier


def serve(courier: Courier) -> None:
    from mpi4py import MPI

    MPI.Init_thread(MPI.THREAD_MULTIPLE)
    courier.tell_mpi_is_up()
    with courier.channel.makefile("rw") as lines:
        for line in lines:
            command, *values = json.loads(line)
            if command == "end":
                break
            json.dump({"sum": add_up, "pass on": pass_on}[command](MPI.COMM_WORLD, *values), lines)
            lines.write("\n")
            lines.flush()
    MPI.Finalize()


def add_up(world: Any, value: int) -> list[int]:
    return [world.rank, world.size, world.allreduce(value)]


def pass_on(world: Any, nbytes: int) -> bool:
    """Send bytes around, and check those that come."""
    before = (world.rank - 1) % world.size
    sent, received = bytearray([world.rank]) * nbytes, bytearray(nbytes)
    world.Sendrecv(sent, (world.rank + 1) % world.size, recvbuf=received, source=before)
    return set(received) == {before}


def before_mpi(courier: Courier) -> None:
    """Never comes to MPI_Init, so that the others wait in theirs."""
    select.select([courier.channel], [], [])
