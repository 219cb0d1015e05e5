"""Set up torch.distributed from a launcher: `mpiexec` or `srun` alone starts everything, without torchrun.

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

from mlflash.channel import connection
from mlflash.checkpointer.off import turned_off
from mlflash.config import Config, from_environment
from mlflash.errors import ConfigError, MlflashError, WorldMismatch
from mlflash.launch.interfaces import own_address
from mlflash.launch.launcher_variables import KEPT, is_on_one_host, launched
from mlflash.launch.program_mpi import share, world_of
from mlflash.launch.rendezvous import meeting_of
from mlflash.run.decider_link import is_spare
from mlflash.run.forked_spare import begin_anew, fork_spares

_BY_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TIMEOUT = datetime.timedelta(minutes=10)
_LEAVE_OUT = ("leave it out: the ranks find each other through their launcher. If you need it, call "
              "torch.distributed's own init_process_group with the launcher's rank and size")  # fmt: skip


@dataclasses.dataclass
class _Ranks:
    """The ranks that a launcher has started."""

    rank: int  # this process
    size: int
    host: str  # name or address at which the others reach rank 0; other ranks ignore theirs
    tell: Callable[[str | None], str]  # gives all ranks the text that rank 0 has; collective


def init_process_group(
    backend: str | None = None, init_method: str | None = None, timeout: datetime.timedelta | None = None,
    world_size: int = -1, rank: int = -1, store: Any = None, group_name: str = "", pg_options: Any = None,
    device_id: torch.device | int | None = None, *, comm: Any = None, host: str | None = None,
) -> None:  # fmt: skip
    """Set up torch.distributed with the ranks of a launcher.

    It takes torch's arguments in torch's order, and three more by name. It does not take ``enable_reconfigure`` of
    PyTorch 2.14: such a group cannot communicate until it is reconfigured, and this call does communicate.

    Collective over ``comm``, or over all ranks. Sets ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``,
    ``GROUP_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT`` as torchrun does, and the CUDA device of this rank.

    The variables of its launcher say which rank this process is; it needs no MPI. Its couriers start in this call, so
    you can make Checkpointers on some ranks only. With ``MLFLASH_DISABLE=1`` no courier starts. Then torch gets your
    arguments unchanged if the variables above are set; otherwise the ranks are still those of the launcher, because
    training needs ranks.

    Args:
        backend: name of a backend of torch. Default: "cpu:gloo,cuda:nccl" with CUDA, else "gloo".
        init_method: None or "env://", which is torch's name for the same. The launcher says which ranks there are.
        timeout: timeout of the collectives of torch.distributed. Default: 10 minutes.
        world_size, rank: leave them out, or give what the launcher says.
        store: None. This call makes the store.
        group_name: torch accepts and ignores it.
        pg_options: options of the backend, as torch takes them.
        device_id: device of this rank, as torch takes it. Default: the CUDA device with the number that this rank has
            on its node.
        comm: mpi4py communicator of the ranks. None: all ranks, or this process alone if no launcher started it.
        host: name or address at which the others reach rank 0's node. Default: mlflash finds it.

    Raises:
        ConfigError: an argument has a value that this call cannot use.
        MpiUnavailable: there is no MPI for couriers.
        WorldMismatch: ``rank`` or ``world_size`` are not those of the launcher, or the ranks cannot find each other.
        DeadlineExceeded: not all ranks made this call in time.
    """
    more = {"timeout": _TIMEOUT if timeout is None else timeout, "group_name": group_name, "pg_options": pg_options,
            "device_id": device_id}  # fmt: skip
    given = {"init_method": init_method, "world_size": world_size, "rank": rank, "store": store}
    _check(backend, comm)
    is_off = turned_off()
    if KEPT in os.environ and not is_off:
        _init_kept(backend, given, more["timeout"])
    else:
        _init_launched(backend, comm, host, is_off, more, given)


def _init_launched(backend: str | None, comm: Any, host: str | None, is_off: bool, more: dict[str, Any],
                   given: dict[str, Any]) -> None:  # fmt: skip
    if comm is None and _has_ranks_of_torchrun():
        _init(backend, int(os.environ.get("LOCAL_RANK", "0")), **more, **given)
    elif comm is None and is_off and {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():  # all that torch needs
        me = launched(os.environ)
        _init(backend, me.local_rank or 0, **more, **given | {"rank": me.rank, "world_size": me.size})
    else:
        ranks = _without_couriers(comm) if is_off else _of_couriers(comm)
        store, local_rank = _meet(ranks, host or ranks.host, more["timeout"], given)
        _init(backend, local_rank, **more, store=store, rank=ranks.rank, world_size=ranks.size)
    if not is_off:
        connection.get(_config(), comm)


def _init_kept(backend: str | None, given: dict[str, Any], timeout: datetime.timedelta) -> None:
    """Set torch.distributed up for a training that continues when ranks are lost (`mlflash.keep_alive`).

    A spare, which has no rank yet, sets itself up with a presumed rank. Collective over the ranks, without spares.
    """
    from torch.distributed.fsdp import FSDPModule

    from . import kept_groups

    if backend not in kept_groups.BACKENDS:
        raise ConfigError("mlflash run --keep-alive replaces the connections of gloo and NCCL only: give one of these "
                          "backends, or none", expected=str(kept_groups.BACKENDS[1:]), found=backend)  # fmt: skip
    if not hasattr(FSDPModule, "reset_iter_state"):
        raise ConfigError("mlflash run --keep-alive needs a newer PyTorch", expected="2.13", found=torch.__version__)
    asked = os.environ["RANK"]

    def is_new() -> bool:
        return given["rank"] == -1 or os.environ["RANK"] == asked

    if is_spare() and not torch.cuda.is_initialized():
        fork_spares(lambda: not torch.cuda._is_in_bad_fork() and is_new())
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if not is_new():  # the program has asked for its rank before this process got another one
        begin_anew(rank)
    if refused := _refused(_Ranks(rank, size, "", str), (given["rank"], given["world_size"]), given["init_method"],
                           timeout, given["store"]):  # fmt: skip
        raise refused
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    kept_groups.init_process_group(rank, size, timeout, backend)
    if not is_spare():
        connection.get(_config())


def _check(backend: Any, comm: Any) -> None:
    """Refuse wrong arguments on this rank alone. Other ranks cannot be told, because there may be none."""
    if backend is not None and not isinstance(backend, str):
        raise ConfigError(
            "the first argument is the backend, as in torch.distributed: give a communicator as comm=",
            expected='a name such as "gloo"', found=type(backend).__name__,
        )  # fmt: skip
    if comm is not None and not hasattr(comm, "allgather"):
        raise ConfigError("comm= must be a communicator of MPI", expected="one of mpi4py", found=type(comm).__name__)


# How the ranks find each other


def _has_ranks_of_torchrun() -> bool:
    """Whether torch can take all that it needs from the environment."""
    has_all = all(name in os.environ for name in _BY_TORCHRUN)
    return has_all and connection.find() is None and launched(os.environ).launcher == "torchrun"


def _of_couriers(comm: Any) -> _Ranks:
    """Give the ranks of a communicator (None: those of the launcher), which have couriers. Collective over them."""
    config = _config()
    couriers = connection.get(config, comm).couriers
    if comm is None:
        return _Ranks(couriers.rank, couriers.size, couriers.host, lambda text: couriers.share(text, config.timeout_s))
    here = couriers.host if comm.rank == couriers.rank else own_address(False, os.environ)  # matters on rank 0 only
    return _Ranks(comm.rank, comm.size, here, lambda text: share(comm, text, config.timeout_s))


def _without_couriers(comm: Any) -> _Ranks:
    """Give the same ranks if mlflash is off. Collective over them."""
    if comm is None:
        me = launched(os.environ)
        comm = world_of(me)
    if comm is not None:
        return _Ranks(comm.rank, comm.size, socket.gethostname(), comm.bcast)
    here = own_address(is_on_one_host(os.environ, me), os.environ)
    place = Path(tempfile.gettempdir(), f"mlflash-{os.getuid()}")  # not in memory; made only if needed
    share = meeting_of(os.environ, me, place, _TIMEOUT.total_seconds()).share
    assert share is not None, "MASTER_ADDR and MASTER_PORT need no meeting"
    return _Ranks(me.rank, me.size, here, lambda text: share(text, _TIMEOUT.total_seconds()))


def _config() -> Config:
    """Give the settings with which couriers start, before any job has a name."""
    return from_environment(os.environ, None, job=os.environ.get("MLFLASH_JOB") or "torch")


def _meet(ranks: _Ranks, host: str, timeout: Any, given: dict[str, Any]) -> tuple[Any, int]:
    """Make torch's store and set the environment. Give the store and this rank's number on its node. Collective."""
    refused = _refused(ranks, (given["rank"], given["world_size"]), given["init_method"], timeout, given["store"])
    patience = timeout if isinstance(timeout, datetime.timedelta) else _TIMEOUT
    store, address, port = _store(ranks, host, patience)
    node, local_rank, local_size = _on_this_node(store, ranks, refused)
    found = {"RANK": ranks.rank, "WORLD_SIZE": ranks.size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size,
             "GROUP_RANK": node, "MASTER_ADDR": address, "MASTER_PORT": port}  # fmt: skip
    os.environ.update({name: str(value) for name, value in found.items()})
    return store, local_rank


def _store(ranks: _Ranks, host: str, timeout: datetime.timedelta) -> tuple[Any, str, int]:
    """Make rank 0's store and connect to it.

    The store listens before the other ranks learn its port, so nothing else can take the port meanwhile.
    """
    if ranks.rank == 0:
        store = dist.TCPStore(host, 0, None, True, timeout, wait_for_workers=False)
        ranks.tell(f"{host},{store.port}")
        return store, host, store.port
    host, _, port = ranks.tell(None).rpartition(",")
    return dist.TCPStore(host, int(port), None, False, timeout), host, int(port)


def _refused(ranks: _Ranks, given: tuple[int, int], init_method: Any, timeout: Any, store: Any) -> Any:
    """Give the error for an argument that this rank cannot use. None: all can be used."""
    if init_method not in (None, "env://"):
        return ConfigError(f"init_method: {_LEAVE_OUT}", expected="None or 'env://'", found=init_method)
    if store is not None:
        return ConfigError(f"store: {_LEAVE_OUT}", expected="None", found=type(store).__name__)
    if not isinstance(timeout, datetime.timedelta):
        return ConfigError("timeout", expected="a datetime.timedelta", found=timeout)
    launched_as = (ranks.rank, ranks.size)
    if any(argument not in (-1, real) for argument, real in zip(given, launched_as, strict=True)):
        return WorldMismatch(
            "rank and world_size are not those of the launcher: leave them out, or give the communicator that has them "
            "(comm=)", rank=launched_as[0], expected=f"rank {launched_as[0]} of {launched_as[1]}, or -1 of -1",
            found=f"rank {given[0]} of {given[1]}",
        )  # fmt: skip
    return None


def _init(backend: str | None, local_rank: int, **more: Any) -> None:
    cuda, device = torch.cuda.is_available(), more["device_id"]
    if cuda:
        torch.cuda.set_device(local_rank % torch.cuda.device_count() if device is None else device)
    dist.init_process_group(backend or ("cpu:gloo,cuda:nccl" if cuda else "gloo"), **more)


def _on_this_node(store: Any, ranks: _Ranks, refused: MlflashError | None) -> tuple[int, int, int]:
    """Give the number of this node, this rank's number on it, and the number of ranks on it.

    Collective. Nodes are numbered in the order of their first ranks. If any rank refused an argument, all ranks raise
    its error.
    """
    host = socket.gethostname()
    answers = dist.PrefixStore("mlflash", store)
    answers.set(str(ranks.rank), pickle.dumps((host, refused)))
    ranks_said = [pickle.loads(packed) for packed in answers.multi_get([str(rank) for rank in range(ranks.size)])]
    errors = [error for _, error in ranks_said if error is not None]
    if errors:
        if answers.add("heard", 1) == ranks.size:
            answers.set("all have heard", "")
        if ranks.rank == 0:  # the store is in this process
            with contextlib.suppress(RuntimeError):
                answers.wait(["all have heard"])
        raise errors[0]
    hosts = [name for name, _ in ranks_said]
    return list(dict.fromkeys(hosts)).index(host), hosts[: ranks.rank].count(host), hosts.count(host)
