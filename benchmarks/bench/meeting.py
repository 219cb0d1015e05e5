"""Lets ranks that MPI has started use courier processes, which find each other through a port, as under torchrun."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

from mpi4py import MPI

from mlflash.wireup.launcher_variables import as_torchrun


@contextlib.contextmanager
def meeting_anew(comm: MPI.Comm) -> Iterator[None]:
    """Set the variables of torchrun, so that courier processes can start: MPI already uses those of the launcher."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = comm.bcast(sock.getsockname()[1], 0)
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(as_torchrun(before, comm.rank, comm.size, comm.rank, "127.0.0.1", port))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
