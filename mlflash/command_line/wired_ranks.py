"""Give the ranks of a program MPI although no MPI launcher started them: their couriers connect to each other.

``python -m mlflash.command_line.wired_ranks -m MODULE ARGUMENTS`` replaces ``mpiexec python -m mpi4py -m MODULE
ARGUMENTS``. You start it once for each rank, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. The ranks meet without
MPI, and the courier of each rank runs the module. `mlflash run` uses it to scavenge if there is no mpiexec.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import select
import sys
import threading
from typing import TYPE_CHECKING, Any

from ..errors import DeadlineExceeded, MlflashError
from ..mpi.world import load_mpi
from ..wireup.courier_process import Courier
from ..wireup.launch import Couriers
from ..wireup.running_courier import CourierEnded
from ..wireup.zygote_client import ZygoteLost, ZygoteRefused

if TYPE_CHECKING:
    from ..wireup.zygote_client import CourierEnd

_ENTRY = "mlflash.command_line.wired_ranks:run"
_MEET_S = 120.0
_LOOK_S = 600.0  # between two checks that the zygote is alive; its end is noticed at once
_WRONG = 1


def main() -> int:
    """Run as one of the ranks, and return the exit code of its courier."""
    if len(sys.argv) < 3 or sys.argv[1] != "-m":
        print("usage: python -m mlflash.command_line.wired_ranks -m MODULE ARGUMENTS", file=sys.stderr)
        return 2
    try:
        with contextlib.closing(Couriers(_ENTRY, os.environ, _MEET_S)) as couriers:
            courier = couriers.courier
            courier.trainer.sendall(json.dumps(sys.argv[2:]).encode() + b"\n")
            if couriers.size > 1:
                couriers.wait_up(_MEET_S)
            end = _wait(couriers, courier.pid)
    except (MlflashError, CourierEnded, ZygoteLost, ZygoteRefused) as error:
        print(f"Error: {' '.join(sys.argv[2:4])} cannot use MPI on this rank: {error}", file=sys.stderr)
        return _WRONG
    return 128 + end.signal if end.signal is not None else end.status or 0


def _wait(couriers: Couriers, pid: int) -> CourierEnd:
    """Wait until the program ends. It has its own deadlines."""
    while True:
        with contextlib.suppress(DeadlineExceeded):
            return couriers.zygote.wait(pid, _LOOK_S)


def run(forked: Courier) -> None:
    """Run the module in a courier. This is the entry point of the forked process."""
    threading.Thread(target=_end_with, args=(forked.trainer_pidfd,), name="mlflash-rank", daemon=True).start()
    mpi: Any = None
    if forked.has_mpi:
        mpi = load_mpi()
        if mpi.COMM_WORLD.size != len(forked.nodes):
            name = mpi.Get_library_version().splitlines()[0]
            print(f"Error: each rank is alone in its MPI world: {name} needs its own launcher to connect the ranks",
                  file=sys.stderr)  # fmt: skip
            raise SystemExit(_WRONG)
        forked.tell_mpi_is_up()
    with forked.trainer.makefile() as lines:
        module, *arguments = json.loads(lines.readline())
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code
    else:
        code = None
    if mpi is not None:  # not after another exception: the other ranks may wait for this one
        mpi.Finalize()
    raise SystemExit(code)


def _end_with(pidfd: int) -> None:
    """End this process when its parent ends."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.poll()
    os._exit(_WRONG)


if __name__ == "__main__":
    sys.exit(main())
