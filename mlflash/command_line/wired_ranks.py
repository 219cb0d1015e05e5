"""The ranks of a program that no launcher of MPI starts, as couriers, which have MPI all the same.

``python -m mlflash.command_line.wired_ranks -m MODULE ARGUMENTS`` does on each rank that RANK, WORLD_SIZE, MASTER_ADDR
and MASTER_PORT name what ``mpiexec python -m mpi4py -m MODULE ARGUMENTS`` does: the ranks meet without MPI, and the
courier of each runs the module. So `mlflash run` scavenges where there is no mpiexec.
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
_LOOK_S = 600.0  # between two looks whether the zygote is there, which says itself when it is not
_WRONG = 1


def main() -> int:
    """Be one of the ranks; gives the exit code of its courier."""
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
        print(f"Error: {' '.join(sys.argv[2:4])} has no MPI on this rank: {error}", file=sys.stderr)
        return _WRONG
    return 128 + end.signal if end.signal is not None else end.status or 0


def _wait(couriers: Couriers, pid: int) -> CourierEnd:
    """Wait for the end of the program, which has deadlines of its own."""
    while True:
        with contextlib.suppress(DeadlineExceeded):
            return couriers.zygote.wait(pid, _LOOK_S)


def run(forked: Courier) -> None:
    """Run the module in a courier. The entry point of the forked process."""
    threading.Thread(target=_end_with, args=(forked.trainer_pidfd,), name="mlflash-rank", daemon=True).start()
    mpi: Any = None
    if forked.has_mpi:
        mpi = load_mpi()
        if mpi.COMM_WORLD.size != len(forked.nodes):
            name = mpi.Get_library_version().splitlines()[0]
            print(f"Error: each rank is an MPI world of its own: {name} cannot be started without its launcher",
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
    if mpi is not None:  # after another exception the others may wait for this rank
        mpi.Finalize()
    raise SystemExit(code)


def _end_with(pidfd: int) -> None:
    """End this process when that ends which has started it."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.poll()
    os._exit(_WRONG)


if __name__ == "__main__":
    sys.exit(main())
