"""Start two couriers on this host as a job starts them, to find out whether this MPI works without a launcher.

An MPI that speaks PMI-1 does. This was tried with MPICH only. Intel MPI, Cray MPICH and MVAPICH are of the same family.
This trial shows whether the installed one works.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping

from ..errors import pip_install
from ..human_readable.wording import last_words
from ..mpi.world import load_mpi
from ..wireup.courier_process import Courier
from ..wireup.launch import Couriers
from ..wireup.launcher_variables import as_torchrun, without_rank
from ..wireup.own_process import running
from .findings import Finding, fine, warning

_MODULE = "mlflash.doctor.courier_trial"
_RANKS = 2
_LOOK_S, _GRACE_S = 0.02, 2.0
_LONGEST_S = 20.0
_CHECK = "couriers"
_LENGTH = 200  # characters of its output that are shown


def look(library: str, environment: Mapping[str, str], timeout_s: float = _LONGEST_S) -> Iterator[Finding]:
    """Start two couriers, let them add up their ranks, and say how long it took. Not collective.

    Args:
        library: name and version of the MPI.
        environment: the environment, ``os.environ`` as a rule.
        timeout_s: how long it may take.
    """
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    start, anew = time.monotonic(), without_rank(environment)
    command = [*running(_MODULE), str(timeout_s)]
    trainers = [
        subprocess.Popen(command, env=as_torchrun(anew, rank, _RANKS, rank, "127.0.0.1", port), text=True,
                         stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for rank in range(_RANKS)
    ]  # fmt: skip
    while any(trainer.poll() is None for trainer in trainers) and not any(trainer.poll() for trainer in trainers):
        if time.monotonic() > start + timeout_s + _GRACE_S:
            break
        time.sleep(_LOOK_S)
    for trainer in trainers:
        trainer.kill()
    said = [trainer.communicate()[0] for trainer in trainers]
    if all(trainer.returncode == 0 for trainer in trainers):
        took = f"{time.monotonic() - start:.1f} s"
        yield fine(_CHECK, "{library} started two couriers without a launcher in {took}", library=library, took=took)
        return
    last = last_words("\n".join(said), "it does not end and prints nothing")
    advice = f"{pip_install('mpich')} into this environment"
    if "pidfd_open" in last:
        advice = "allow pidfd_open and pidfd_send_signal in the container's profile"
    yield warning(
        _CHECK, "{library} does not start without its launcher: {said}",
        advice + "; or set MLFLASH_COURIER=thread and start with its own mpiexec or srun", library=library,
        said=last[:_LENGTH],
    )  # fmt: skip


def add_up(courier: Courier) -> None:
    """Add up the ranks, in each courier."""
    comm = load_mpi().COMM_WORLD
    courier.tell_mpi_is_up()
    courier.trainer.sendall(bytes([comm.allreduce(comm.rank + 1)]))


def main() -> int:
    """Run as one of the two trainers."""
    timeout_s = float(sys.argv[1])
    couriers = Couriers(f"{_MODULE}:add_up", os.environ, timeout_s)
    try:
        couriers.wait_up(timeout_s)
        courier = couriers.courier
        courier.trainer.settimeout(timeout_s)
        is_right = courier.trainer.recv(1) == bytes([sum(range(1, _RANKS + 1))])
        couriers.zygote.wait(courier.pid, timeout_s)
    finally:
        couriers.close()
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
