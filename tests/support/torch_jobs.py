"""Jobs of the first ranks of one launch, each with torch.distributed of its own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from unittest import mock

import torch.distributed as dist
from mpi4py import MPI

from mlflash.adapters.distributed import init_process_group

COMM = MPI.COMM_WORLD


@contextlib.contextmanager
def job(size: int = COMM.size) -> Iterator[MPI.Comm | None]:
    """Give a communicator of the first so many ranks, the default process group made of it; None on the others."""
    comm = COMM.Split(0 if size > COMM.rank else MPI.UNDEFINED, COMM.rank)
    if comm == MPI.COMM_NULL:
        yield None
    else:
        with mock.patch.dict(os.environ):  # the variables of this job are no other one's
            init_process_group(comm=comm, host="127.0.0.1")
            try:
                yield comm
            finally:
                dist.destroy_process_group()
                comm.Free()
    COMM.Barrier()
