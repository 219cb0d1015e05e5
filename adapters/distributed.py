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
from mlflash.errors import ConfigError, MlflashError, MpiUnavailable, WorldMismatch
from mlflash.mpi.world import find_comm

_BY_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TIMEOUT = datetime.timedelta(minutes=10)
_BY_MPI = "leave it out: the ranks find each other through MPI. What needs it calls torch.distributed's own "
_BY_MPI += "init_process_group with MPI's rank and size"


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: datetime.timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Any = None,
    group_name: str = "",
    pg_options: Any = None,
    device_id: torch.device | int | None = None,
    *,
    comm: Any = None,
    host: str | None = None,
) -> None:
    """Set up torch.distributed with the ranks of an MPI communicator: torch's arguments in torch's order, then ours.

    Collective over ``comm``. Sets ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and
    ``MASTER_PORT`` as torchrun does, and the CUDA device of this rank. With ``MLFLASH_DISABLE=1`` the ranks are those
    of these variables where they are set, without MPI, and torch gets its arguments as they are; else those of MPI
    still, as training needs some.

    Args:
        backend: as torch names them. Default: "cpu:gloo,cuda:nccl" where there is CUDA, else "gloo".
        init_method: None, or torch's word for that, "env://": MPI says which ranks there are.
        timeout: of the collectives of torch.distributed. Default: 10 minutes.
        world_size: the number of ranks that MPI has, where it is given.
        rank: the one that MPI has given this process, where it is given.
        store: None; the store is made here.
        group_name: torch takes it, and ignores it.
        pg_options: of the backend, as torch takes them.
        device_id: of this rank, as torch takes it. Default: the CUDA device of its number on its node.
        comm: mpi4py communicator; None is COMM_WORLD, or this process alone where nothing launched it.
        host: name or address of rank 0's node as the others reach it. Default: its host name.

    Raises:
        ConfigError: an argument that cannot be honoured.
        MpiUnavailable: torchrun started this process: its ranks are no MPI ranks.
        WorldMismatch: ``rank`` or ``world_size`` are not those of MPI.
    """
    timeout = _TIMEOUT if timeout is None else timeout
    more = {"timeout": timeout, "group_name": group_name, "pg_options": pg_options, "device_id": device_id}
    if comm is None and all(name in os.environ for name in _BY_TORCHRUN) and turned_off():
        more |= {"init_method": init_method, "world_size": world_size, "rank": rank, "store": store}
        _init(backend, int(os.environ.get("LOCAL_RANK", "0")), **more)
        return
    comm = _communicator(backend, comm)
    mine = (0, 1) if comm is None else (comm.rank, comm.size)
    local_rank, local_size = _on_this_node(comm, _refused(mine, (rank, world_size), init_method, timeout, store))
    store, address, port = _store(comm, mine[0], host, timeout)
    found = {"RANK": mine[0], "WORLD_SIZE": mine[1], "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size}
    found |= {"MASTER_ADDR": address, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in found.items()})
    _init(backend, local_rank, store=store, rank=mine[0], world_size=mine[1], **more)


def _communicator(backend: Any, comm: Any) -> Any:
    """Give the communicator to use; refuse what no other rank can be told of, as there may be none.

    Raises:
        ConfigError: saying how a communicator is given.
        MpiUnavailable: torchrun started this process.
    """
    if backend is not None and not isinstance(backend, str):
        raise ConfigError(
            "the first argument is the backend, as in torch.distributed: give a communicator as comm=",
            expected='a name such as "gloo"', found=type(backend).__name__,
        )  # fmt: skip
    if comm is not None and not hasattr(comm, "allgather"):
        raise ConfigError("comm= is a communicator of MPI", expected="one of mpi4py", found=type(comm).__name__)
    comm = find_comm(os.environ) if comm is None else comm
    if (comm is None or comm.size == 1) and "TORCHELASTIC_RUN_ID" in os.environ:
        raise MpiUnavailable(
            "torchrun started this process, and its ranks are no MPI ranks: start with mpiexec -n RANKS or srun "
            "instead; init_process_group then gives torch.distributed the ranks of MPI",
            expected="ranks of mpiexec or srun", found="torchrun (TORCHELASTIC_RUN_ID) and no MPI launcher",
        )  # fmt: skip
    return comm


def _store(comm: Any, rank: int, host: str | None, timeout: datetime.timedelta) -> tuple[Any, str, int]:
    """Make rank 0's store, and connect to it: the port is taken already when the others hear of it, no race for it."""
    store: Any = None
    if rank == 0:
        host = host or socket.gethostname()
        store = dist.TCPStore(host, 0, None, True, timeout, wait_for_workers=False)
    address: tuple[Any, int] = (host, store.port if rank == 0 else 0)
    host, port = address if comm is None else comm.bcast(address)
    if rank > 0:
        store = dist.TCPStore(host, port, None, False, timeout)
    return store, str(host), port


def _refused(mine: tuple[int, int], given: tuple[int, int], init_method: Any, timeout: Any, store: Any) -> Any:
    """What this rank cannot honour, as an error; None: nothing."""
    if init_method not in (None, "env://"):
        return ConfigError(f"init_method: {_BY_MPI}", expected="None or 'env://'", found=init_method)
    if store is not None:
        return ConfigError(f"store: {_BY_MPI}", expected="None", found=type(store).__name__)
    if not isinstance(timeout, datetime.timedelta):
        return ConfigError("timeout", expected="a datetime.timedelta", found=timeout)
    if any(one not in (-1, real) for one, real in zip(given, mine, strict=True)):
        return WorldMismatch(
            "rank and world_size are not those of MPI: leave them out, or give the communicator that has them (comm=)",
            rank=mine[0], expected=f"rank {mine[0]} of {mine[1]}, or -1 of -1", found=f"rank {given[0]} of {given[1]}",
        )  # fmt: skip
    return None


def _init(backend: str | None, local_rank: int, **more: Any) -> None:
    cuda, device = torch.cuda.is_available(), more["device_id"]
    if cuda:
        torch.cuda.set_device(local_rank % torch.cuda.device_count() if device is None else device)
    dist.init_process_group(backend or ("cpu:gloo,cuda:nccl" if cuda else "gloo"), **more)


def _on_this_node(comm: Any, refused: MlflashError | None) -> tuple[int, int]:
    """Give this rank's number on its node, and how many are there; raise what any rank refuses on all."""
    host = socket.gethostname()
    said = [(host, refused)] if comm is None else comm.allgather((host, refused))
    for _, error in said:
        if error is not None:
            raise error
    hosts, number = [name for name, _ in said], 0 if comm is None else comm.rank
    return hosts[:number].count(host), hosts.count(host)
