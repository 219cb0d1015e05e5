"""torch.distributed from MPI: `mpiexec` or `srun` alone starts everything, without torchrun.

Example:
    from mlflash.adapters.distributed import init_process_group

    init_process_group()  # gloo, and NCCL where there are GPUs
    with mlflash.Checkpointer(directory) as ckpt: ...
"""

from __future__ import annotations

import datetime
import os
import socket
from typing import Any

import torch
import torch.distributed as dist

from mlflash.checkpointer.disabled import turned_off
from mlflash.errors import MpiUnavailable
from mlflash.mpi.world import find_comm

_BY_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def init_process_group(
    comm: Any = None,
    backend: str | None = None,
    timeout: datetime.timedelta = datetime.timedelta(minutes=10),
    host: str | None = None,
) -> None:
    """Set up torch.distributed with the ranks of an MPI communicator.

    Collective over ``comm``. Sets ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and
    ``MASTER_PORT`` as torchrun does, and the CUDA device of this rank. With ``MLFLASH_DISABLE=1`` the ranks are those
    of these variables where they are set, as torchrun does, without MPI; else those of MPI still, as training needs
    some.

    Args:
        comm: mpi4py communicator; None is COMM_WORLD, or this process alone where nothing launched it.
        backend: as torch names them. Default: "cpu:gloo,cuda:nccl" where there is CUDA, else "gloo".
        timeout: of the collectives of torch.distributed.
        host: name or address of rank 0's node as the others reach it. Default: its host name.

    Raises:
        MpiUnavailable: torchrun started this process: its ranks are no MPI ranks.
    """
    if comm is None and all(name in os.environ for name in _BY_TORCHRUN) and turned_off():
        _init(backend, int(os.environ.get("LOCAL_RANK", "0")), timeout=timeout)
        return
    comm = find_comm(os.environ) if comm is None else comm
    if (comm is None or comm.size == 1) and "TORCHELASTIC_RUN_ID" in os.environ:
        raise MpiUnavailable(
            "torchrun started this process, and its ranks are no MPI ranks: start with mpiexec -n RANKS or srun "
            "instead; init_process_group then gives torch.distributed the ranks of MPI",
            expected="ranks of mpiexec or srun", found="torchrun (TORCHELASTIC_RUN_ID) and no MPI launcher",
        )  # fmt: skip
    rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
    local_rank, local_size = _on_this_node(comm)
    store: Any = None
    if rank == 0:
        host = host or socket.gethostname()
        store = dist.TCPStore(host, 0, None, True, timeout, wait_for_workers=False)
    address: tuple[Any, int] = (host, store.port if rank == 0 else 0)
    host, port = address if comm is None else comm.bcast(address)  # the port is taken already: no race for it
    if rank > 0:
        store = dist.TCPStore(host, port, None, False, timeout)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(local_rank), LOCAL_WORLD_SIZE=str(local_size),
        MASTER_ADDR=str(host), MASTER_PORT=str(port),
    )  # fmt: skip
    _init(backend, local_rank, store=store, rank=rank, world_size=size, timeout=timeout)


def _init(backend: str | None, local_rank: int, **more: Any) -> None:
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    dist.init_process_group(backend or ("cpu:gloo,cuda:nccl" if cuda else "gloo"), **more)


def _on_this_node(comm: Any) -> tuple[int, int]:
    if comm is None:
        return 0, 1
    hosts = comm.allgather(socket.gethostname())
    return hosts[: comm.rank].count(hosts[comm.rank]), hosts.count(hosts[comm.rank])
