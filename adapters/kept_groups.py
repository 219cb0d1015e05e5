"""Keep process groups, DDP and FSDP2 of a training when other processes take over ranks (`mlflash.keep_alive`)."""

from __future__ import annotations

import gc
import json
import logging
import os
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from mlflash.launch.interfaces import own_address
from mlflash.run.decider_link import Seat, is_spare, registered_groups
from mlflash.run.forked_spare import begin_anew

from . import exchangeable_group
from .exchangeable_group import BACKEND, shut_down
from .left_steps import buckets_of, forget_step

log = logging.getLogger("mlflash")

_ON_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_MEETS = timedelta(seconds=10)  # limit for all ranks to come to the store


class TorchGroups:
    """All process groups of this process, see `mlflash.run.decider_link`.

    Args:
        timeout: timeout of the collectives of torch.distributed.
    """

    def __init__(self, timeout: timedelta):
        self._timeout = timeout
        self._store: dist.TCPStore | None = None
        self._meets: tuple[str, int] | None = None  # where the store is

    def drop(self) -> None:
        exchangeable_group.cut_all()
        if self._meets:
            shut_down({self._meets})

    def connect(self, seat: Seat, share: Callable[[str, str | None], str]) -> None:
        if seat.rank == 0:
            host = own_address(False, os.environ)
            self._store = dist.TCPStore(host, 0, None, True, _MEETS, wait_for_workers=False)
            share("torch", f"{host},{self._store.port}")
            self._meets = host, self._store.port
        else:
            host, _, port = share("torch", None).rpartition(",")
            self._meets = host, int(port)
            self._store = dist.TCPStore(host, int(port), None, False, _MEETS)
        exchangeable_group.exchange_all(dist.PrefixStore(f"round {seat.round}", self._store), self._timeout)

    def forget_step(self) -> None:
        models = sorted(_wrapped(), key=_looks)
        known = [buckets_of(model) for model in models]
        store = dist.PrefixStore("buckets", self._store)
        store.set(str(dist.get_rank()), json.dumps(known))
        for rank in range(dist.get_world_size()):  # a process that had no rank before does not know the buckets
            if any(map(any, known)):
                break
            known = json.loads(store.get(str(rank)))
        for model, buckets in zip(models, known, strict=True):
            forget_step(model, buckets)

    def take(self, rank: int) -> None:
        if dist.get_rank() == rank:
            return
        all_ranks = dist.get_world_size()
        knows = any(type(one) is DeviceMesh for one in gc.get_objects())
        if knows or any(group.size() != all_ranks for group in exchangeable_group.groups()):
            begin_anew(rank)
        for group in exchangeable_group.groups():
            group.take(rank)


def _looks(model: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    """Give a key to sort models by, the same on all ranks. Models with the same key are interchangeable."""
    return [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]


def _wrapped() -> list[nn.Module]:
    """Give all outermost modules of DDP and FSDP2."""
    kinds = (DistributedDataParallel, FSDPModule)
    found = [one for one in gc.get_objects() if issubclass(type(one), kinds)]
    inside = {id(part) for one in found for part in one.modules() if part is not one}
    return [one for one in found if id(one) not in inside]


def init_process_group(rank: int, size: int, timeout: timedelta) -> None:
    """Set up torch.distributed with groups whose connections can be replaced.

    Collective, but a spare, which has no rank, calls it alone.
    """
    if os.environ.get(_ON_ERRORS, "0") != "0":
        log.warning("mlflash sets %s=%s to 0: otherwise PyTorch would end this process when another one is lost",
                    _ON_ERRORS, os.environ[_ON_ERRORS])  # fmt: skip
    # If a peer dies, NCCL's watchdog ends the process (1, 3) or only the wait (2). After the latter, training would go
    # on and save with wrong sums. Here the process that decides about the round ends the wait.
    os.environ[_ON_ERRORS] = "0"
    exchangeable_group.register()
    store = None  # that of MASTER_ADDR
    if is_spare():
        exchangeable_group.presume()
        store = dist.HashStore()
    dist.init_process_group(BACKEND, rank=rank, world_size=size, timeout=timeout, store=store)
    registered_groups[:] = [TorchGroups(timeout)]
