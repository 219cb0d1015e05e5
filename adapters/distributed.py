"""torch.distributed from a launcher: `mpiexec` or `srun` alone starts everything, without torchrun.

Example:
    from mlflash.adapters.distributed import init_process_group

    init_process_group()  # gloo, and NCCL where there are GPUs
    with mlflash.Checkpointer(directory) as ckpt: ...
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import pickle
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mlflash.checkpointer.disabled import turned_off
from mlflash.config import Config, from_environment
from mlflash.courier import linked
from mlflash.courier.choice import Choice, choose
from mlflash.errors import ConfigError, MlflashError, MpiUnavailable, WorldMismatch
from mlflash.in_place.decider_link import decider, is_spare
from mlflash.in_place.forked_spare import fork_spares
from mlflash.mpi.world import find_comm
from mlflash.wireup.launcher_variables import KEPT, PRESUMED, is_on_one_host, launched
from mlflash.wireup.own_address import own_address
from mlflash.wireup.pmi_client import uses_mpi
from mlflash.wireup.rendezvous import rendezvous, way

_BY_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TIMEOUT = datetime.timedelta(minutes=10)
_LEAVE_OUT = (
    "leave it out: the ranks find each other through their launcher. If you need it, call torch.distributed's own "
)
_LEAVE_OUT += "init_process_group with the launcher's rank and size"


@dataclasses.dataclass
class _Ranks:
    """The ranks that a launcher has started.

    Attributes:
        rank, size: of this process, and of all.
        host: of rank 0, as the others reach it; on other ranks it is not looked at.
        tell: gives all ranks the text that rank 0 has. Collective.
    """

    rank: int
    size: int
    host: str
    tell: Callable[[str | None], str]


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
    courier: str | None = None,
) -> None:
    """Set up torch.distributed with the ranks of a launcher: torch's arguments in torch's order, then ours.

    Collective over ``comm``, or over all ranks. Sets ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``,
    ``GROUP_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT`` as torchrun does, and the CUDA device of this rank.

    Where couriers are threads the ranks are those of MPI. Where they are processes this one stays without MPI: its
    launcher's variables say which rank it is, and its couriers start here, so that Checkpointers of some ranks need no
    others. With ``MLFLASH_DISABLE=1`` torch gets its arguments as they are where the variables above are set; else the
    ranks are those of the launcher still, as training needs some, and no courier is started.

    Args:
        backend: as torch names them. Default: "cpu:gloo,cuda:nccl" where there is CUDA, else "gloo".
        init_method: None, or torch's word for that, "env://": the launcher says which ranks there are.
        timeout: of the collectives of torch.distributed. Default: 10 minutes.
        world_size, rank: those that the launcher says, where they are given.
        store: None; the store is made here.
        group_name: torch takes it, and ignores it.
        pg_options: of the backend, as torch takes them.
        device_id: of this rank, as torch takes it. Default: the CUDA device of its number on its node.
        comm: mpi4py communicator that has the ranks; None: all, or this process alone where nothing launched it.
        host: name or address of rank 0's node as the others reach it. Default: found out.
        courier: as the Checkpointers of this program have it. Default: ``MLFLASH_COURIER``.

    Raises:
        ConfigError: an argument that cannot be honoured.
        MpiUnavailable: torchrun started this process, and couriers are threads: its ranks are no MPI ranks.
        WorldMismatch: ``rank`` or ``world_size`` are not those of the launcher, or ranks cannot find each other.
        DeadlineExceeded: not all ranks have come.
    """
    more = {"timeout": _TIMEOUT if timeout is None else timeout, "group_name": group_name, "pg_options": pg_options,
            "device_id": device_id}  # fmt: skip
    given = {"init_method": init_method, "world_size": world_size, "rank": rank, "store": store}
    _check(backend, comm)
    is_off = turned_off()
    if KEPT in os.environ and not is_off:
        _init_kept(backend, given, more["timeout"])
    else:
        _init_launched(backend, comm, host, _choose(courier, comm, is_off), is_off, more, given)


def _init_launched(backend: str | None, comm: Any, host: str | None, choice: Choice, is_off: bool,
                   more: dict[str, Any], given: dict[str, Any]) -> None:  # fmt: skip
    """Set it up with the ranks of a launcher, or of a communicator. Collective."""
    if comm is None and _has_ranks_of_torchrun(is_off, choice.is_process):
        _init(backend, int(os.environ.get("LOCAL_RANK", "0")), **more, **given)
    else:
        ranks = _without_mpi(is_off, choice.zygote) if choice.is_process and not uses_mpi() else _of_mpi(comm)
        store, local_rank = _meet(ranks, host or ranks.host, more["timeout"], given)
        _init(backend, local_rank, **more, store=store, rank=ranks.rank, world_size=ranks.size)
    if choice.is_process and not is_off:
        linked.link(_config("process"), choice.zygote)


def _init_kept(backend: str | None, given: dict[str, Any], timeout: datetime.timedelta) -> None:
    """Set it up for a training that goes on when others are lost; a process that waits for a rank presumes one.

    Collective, but for those that wait.
    """
    from . import kept_groups

    if backend is not None or any(value not in (None, -1) for value in given.values()):
        raise ConfigError("under mlflash run --keep-alive, init_process_group takes no backend, store or ranks",
                          expected="none of them", found=str(backend or given))  # fmt: skip
    if is_spare() and not torch.cuda.is_initialized():
        fork_spares(lambda: not torch.cuda._is_in_bad_fork())
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    link = decider()
    if is_spare() and link is not None:
        kept_groups.init_process_group(int(os.environ.get(PRESUMED, "0")), link.size, timeout)
        return
    kept_groups.init_process_group(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), timeout)
    linked.link(_config("process"))


def _choose(courier: str | None, comm: Any, is_off: bool) -> Choice:
    """Choose what the couriers are, or would be: where all is off, none is started."""
    if not is_off:
        return choose(_config(courier).courier, comm)
    kind = courier or os.environ.get("MLFLASH_COURIER") or Config.courier
    meets = kind == "process" or (kind == "auto" and way(os.environ, launched(os.environ)) != "")
    return Choice(comm is None and meets, "mlflash is off")


def _check(backend: Any, comm: Any) -> None:
    """Refuse what no other rank can be told of, as there may be none."""
    if backend is not None and not isinstance(backend, str):
        raise ConfigError(
            "the first argument is the backend, as in torch.distributed: give a communicator as comm=",
            expected='a name such as "gloo"', found=type(backend).__name__,
        )  # fmt: skip
    if comm is not None and not hasattr(comm, "allgather"):
        raise ConfigError("comm= must be a communicator of MPI", expected="one of mpi4py", found=type(comm).__name__)


# How the ranks find each other


def _has_ranks_of_torchrun(is_off: bool, is_process: bool) -> bool:
    """Whether torch finds all that it needs in the environment, and nothing else has to be looked at."""
    if not all(name in os.environ for name in _BY_TORCHRUN):
        return False
    by_torchrun = is_process and not linked.is_linked() and launched(os.environ).launcher == "torchrun"
    return is_off or by_torchrun


def _of_mpi(comm: Any) -> _Ranks:
    """The ranks of a communicator; None: of MPI.

    Raises:
        MpiUnavailable: torchrun started this process.
    """
    comm = find_comm(os.environ) if comm is None else comm
    if (comm is None or comm.size == 1) and "TORCHELASTIC_RUN_ID" in os.environ:
        raise MpiUnavailable(
            "torchrun started this process, and its ranks are not MPI ranks: start with mpiexec -n RANKS or srun "
            "instead. init_process_group then gives torch.distributed the ranks of MPI",
            expected="ranks of mpiexec or srun", found="torchrun (TORCHELASTIC_RUN_ID) and no MPI launcher",
        )  # fmt: skip
    here = socket.gethostname()
    return _Ranks(0, 1, here, str) if comm is None else _Ranks(comm.rank, comm.size, here, comm.bcast)


def _without_mpi(is_off: bool, zygote: Any) -> _Ranks:
    """The ranks of the launcher's variables. Collective over them."""
    if not is_off:
        config = _config("process")
        couriers = linked.link(config, zygote).couriers
        return _Ranks(couriers.rank, couriers.size, couriers.host, lambda text: couriers.share(text, config.timeout_s))
    me = launched(os.environ)
    here = own_address(is_on_one_host(os.environ, me), os.environ)
    place = Path(tempfile.gettempdir(), f"mlflash-{os.getuid()}")  # memory is left alone; made only if it is needed
    meet = lambda text: rendezvous(os.environ, me, text, place, _TIMEOUT.total_seconds()) if me.size > 1 else text
    return _Ranks(me.rank, me.size, here, meet)


def _config(courier: str | None) -> Config:
    """The settings by which couriers start, before any job has a name."""
    return from_environment(os.environ, None, job=os.environ.get("MLFLASH_JOB") or "torch", courier=courier)


def _meet(ranks: _Ranks, host: str, timeout: Any, given: dict[str, Any]) -> tuple[Any, int]:
    """Make torch's store, and give it and this rank's number on its node; the environment is set. Collective."""
    refused = _refused(ranks, (given["rank"], given["world_size"]), given["init_method"], timeout, given["store"])
    patience = timeout if isinstance(timeout, datetime.timedelta) else _TIMEOUT
    store, address, port = _store(ranks, host, patience)
    node, local_rank, local_size = _on_this_node(store, ranks, refused)
    found = {"RANK": ranks.rank, "WORLD_SIZE": ranks.size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size,
             "GROUP_RANK": node, "MASTER_ADDR": address, "MASTER_PORT": port}  # fmt: skip
    os.environ.update({name: str(value) for name, value in found.items()})
    return store, local_rank


def _store(ranks: _Ranks, host: str, timeout: datetime.timedelta) -> tuple[Any, str, int]:
    """Make rank 0's store, and connect to it: the port is taken already when the others hear of it, no race for it."""
    if ranks.rank == 0:
        store = dist.TCPStore(host, 0, None, True, timeout, wait_for_workers=False)
        ranks.tell(f"{host},{store.port}")
        return store, host, store.port
    host, _, port = ranks.tell(None).rpartition(",")
    return dist.TCPStore(host, int(port), None, False, timeout), host, int(port)


def _refused(ranks: _Ranks, given: tuple[int, int], init_method: Any, timeout: Any, store: Any) -> Any:
    """What this rank cannot honour, as an error; None: nothing."""
    if init_method not in (None, "env://"):
        return ConfigError(f"init_method: {_LEAVE_OUT}", expected="None or 'env://'", found=init_method)
    if store is not None:
        return ConfigError(f"store: {_LEAVE_OUT}", expected="None", found=type(store).__name__)
    if not isinstance(timeout, datetime.timedelta):
        return ConfigError("timeout", expected="a datetime.timedelta", found=timeout)
    mine = (ranks.rank, ranks.size)
    if any(one not in (-1, real) for one, real in zip(given, mine, strict=True)):
        return WorldMismatch(
            "rank and world_size are not those of the launcher: leave them out, or give the communicator that has them "
            "(comm=)", rank=mine[0], expected=f"rank {mine[0]} of {mine[1]}, or -1 of -1",
            found=f"rank {given[0]} of {given[1]}",
        )  # fmt: skip
    return None


def _init(backend: str | None, local_rank: int, **more: Any) -> None:
    cuda, device = torch.cuda.is_available(), more["device_id"]
    if cuda:
        torch.cuda.set_device(local_rank % torch.cuda.device_count() if device is None else device)
    dist.init_process_group(backend or ("cpu:gloo,cuda:nccl" if cuda else "gloo"), **more)


def _on_this_node(store: Any, ranks: _Ranks, refused: MlflashError | None) -> tuple[int, int, int]:
    """Give the node's number, this rank's on it, and how many are there; raise what any rank refuses on all.

    Collective. Nodes count as their ranks do.
    """
    host = socket.gethostname()
    told = dist.PrefixStore("mlflash", store)
    told.set(str(ranks.rank), pickle.dumps((host, refused)))
    said = [pickle.loads(one) for one in told.multi_get([str(rank) for rank in range(ranks.size)])]
    errors = [error for _, error in said if error is not None]
    if errors:
        if told.add("heard", 1) == ranks.size:
            told.set("all have heard", "")
        if ranks.rank == 0:  # whose store it is
            with contextlib.suppress(RuntimeError):
                told.wait(["all have heard"])
        raise errors[0]
    hosts = [name for name, _ in said]
    return list(dict.fromkeys(hosts)).index(host), hosts[: ranks.rank].count(host), hosts.count(host)
