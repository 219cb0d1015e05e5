"""Keep process groups, DDP and FSDP2 of a training when other processes take over ranks (`mlflash.keep_alive`).

A model, a device mesh and a compiled step refer to process groups by object and by name. If groups were destroyed and
made again, all of these would have to be made again. The groups of this module stay, with their names, and only their
connections are replaced. Each uses one of torch's own groups to send. When a rank is lost, that inner group is dropped,
and a new one is made with the process that has the rank now. If torch.distributed is initialized with the backend
`BACKEND`, all its groups are of this kind. A spare, which waits for a rank, makes its model with fake groups
(`presume`): what these send goes nowhere, and each process receives its own data.

Source: torchft's managed process groups, which keep a group in the same way; `torch.distributed.Backend`.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import json
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupGloo, Store, Work
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.futures import Future

from mlflash.errors import ConfigError, MlflashError
from mlflash.events import Event
from mlflash.launch.interfaces import own_address
from mlflash.memory.process_names import read_stat
from mlflash.run.decider_link import Seat, is_spare, registered_groups
from mlflash.run.forked_spare import begin_anew
from mlflash.run.progress import progress

from .wrappers import (
    buckets_of,
    forget_meshes,
    forget_step,
    instances,
    let_go,
    meshes_of,
    place,
    ranks_of,
    reshard,
    set_ranks,
    sort_key,
    unit,
    wrapped_models,
)

log = logging.getLogger("mlflash")

Address = tuple[str, int]
BACKEND = "exchangeable"
BACKENDS = (None, "gloo", "nccl", "cpu:gloo,cuda:nccl")
"""What a program may ask for; None: gloo, and NCCL where there are GPUs. "nccl" has gloo for CPU tensors, too."""
# All methods that send. Torch calls those that its version has.
_SENDING = ("_allgather_base", "_reduce_scatter_base", "all_gather_single", "all_gather_single_coalesced",
            "all_to_all_single", "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce",
            "allreduce_coalesced", "alltoall", "alltoall_base", "barrier", "broadcast", "gather", "monitored_barrier",
            "recv", "recv_anysource", "reduce", "reduce_scatter", "reduce_scatter_single",
            "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "scatter", "send")  # fmt: skip
_BETWEEN_TWO = ("recv", "recv_anysource", "send")  # not all ranks call these as often
_groups: weakref.WeakValueDictionary[str, ExchangeableGroup] = weakref.WeakValueDictionary()
_completed: Any = _distributed_c10d._create_work_from_future  # type: ignore[attr-defined]
_interrupted: list[InterruptibleWork] = []  # interrupted while gloo still ran them
_left: list[Event] = []  # for dropped groups that this process may still use
_QUIET_S = 10.0
_ASLEEP_S, _LOOK_S = 0.3, 0.01
_COMPUTES = "pt_gloo_runloop"  # torch's name for these threads
_MEETS = timedelta(seconds=10)  # limit for all ranks to meet or connect; gloo would not notice a loss meanwhile
_ON_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_drops = 0  # how often all groups were dropped
_has_nccl = False  # whether groups use NCCL
_all_ranks = 0  # of the job, while there are groups
_presumes = False  # whether groups are made without other processes


class ConnectionDropped(ConnectionError):
    """A group was used after `drop` and before `exchange`."""


class ExchangeableGroup(ProcessGroup):
    """A process group that uses one of torch's own groups, which can be replaced.

    Args:
        rank: rank of this process in the group.
        size: number of ranks in the group.
        connections: torch's own group.
        listeners: see `connect`.
    """

    def __init__(self, rank: int, size: int, connections: ProcessGroup, listeners: Collection[Address] = ()):
        super().__init__(rank, size)
        self._rank, self._size, self._connections, self._listeners = rank, size, connections, listeners
        self._name = self._description = ""
        self._works: weakref.WeakSet[InterruptibleWork] = weakref.WeakSet()

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    getRank, getSize = rank, size  # as C++ calls them

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    def take(self, rank: int, ranks: Sequence[int]) -> None:
        """Set another rank in the group, and the ranks of the job that the group has, from the next `exchange` on."""
        self._rank, self._size = rank, len(ranks)
        set_ranks(self, ranks)

    def _set_group_name(self, name: str) -> None:
        self._name = name
        _groups[name] = self

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    @property
    def connections(self) -> ProcessGroup:
        if self._connections is None:
            raise self._dropped()
        return self._connections

    def _dropped(self) -> ConnectionDropped:
        return ConnectionDropped(f"process group {self._name} lost a rank, and has no connections until it is replaced")

    def watched(self, work: dist.Work | None) -> dist.Work | None:
        """Wrap a collective of gloo, which `drop` might not end, so that `drop` ends it."""
        if work is None:  # the call has waited already
            return None
        interruptible = InterruptibleWork(work)
        self._works.add(interruptible)
        if self._connections is None:  # it was dropped a moment ago
            self._interrupt(interruptible)
        return interruptible

    def drop(self) -> None:
        """Drop torch's group, and end all calls in which this process waits for it. Not collective; any thread.

        Calls that wait for this process on other ranks raise an error.
        """
        dropped, self._connections = self._connections, None
        if dropped is not None:
            _keep(dropped)
            dropped.abort()
        works, self._works = list(self._works), weakref.WeakSet()
        for work in works:
            self._interrupt(work)

    def _interrupt(self, work: InterruptibleWork) -> None:
        work.interrupt(self._dropped())
        if work.has_memory:
            _interrupted.append(work)

    def cut(self) -> None:
        """Drop torch's group, and end the calls in which any rank waits for it, except ranks that are cut off.

        Not collective; any thread.
        """
        shut_down(self._listeners)
        self.drop()

    def exchange(self, store: Store, timeout: timedelta) -> None:
        """Connect again after `drop`. Collective over the group.

        Args:
            store: for this group alone.
        """
        self._connections, self._listeners = connect(store, self._rank, self._size, timeout)

    shutdown = drop
    abort = drop


def _passed_on(name: str) -> Callable[..., Work]:
    def call(self: ExchangeableGroup, *args: Any, **named: Any) -> Work:
        connections = self.connections
        progress.collective(name, self._size == _all_ranks and name not in _BETWEEN_TWO)
        work: Work = getattr(connections, name)(*args, **named)
        if not isinstance(connections, FakeProcessGroup):
            return work if _has_nccl and _is_on_device(args) else self.watched(work)
        future: Future[Any] = Future()  # a fake group's work has no result, which DDP needs
        future.set_result(args[0])
        return _completed(future)

    call.__name__ = name
    return call


for _name in _SENDING:
    if hasattr(ProcessGroup, _name):
        setattr(ExchangeableGroup, _name, _passed_on(_name))


def _is_on_device(arguments: Any) -> bool:
    """Whether NCCL runs the call. NCCL can be aborted, and the host does not wait in it."""
    if isinstance(arguments, torch.Tensor):
        return bool(arguments.is_cuda)
    return isinstance(arguments, (list, tuple)) and any(map(_is_on_device, arguments))


def _keep(dropped: ProcessGroup) -> None:
    """Keep a dropped group until `exchange_all`, then free it on a thread, because freeing waits for gloo's calls."""
    is_left = Event()
    _left.append(is_left)
    threading.Thread(target=_let_go, args=([dropped], is_left), name="mlflash-dropped", daemon=True).start()


def _let_go(dropped: list[ProcessGroup], is_left: Event) -> None:
    is_left.wait()
    dropped.clear()


def connect(store: Store, rank: int, size: int, timeout: timedelta) -> tuple[ProcessGroup, set[Address]]:
    """Make one of torch's own groups, with gloo for CPU tensors and NCCL for CUDA tensors. Collective over the group.

    The part with NCCL has never been run.

    Args:
        store: a store for this group alone.
        rank: rank of this process in the group.
        size: number of ranks in the group.
        timeout: timeout of each call.

    Returns:
        The group, and the addresses at which gloo listens for it on all ranks, for `shut_down`.
    """
    group, kinds = ProcessGroup(store, rank, size), ProcessGroup.BackendType
    gloo, listeners = _connect_gloo(store, rank, size, timeout)
    group._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
    group._set_default_backend(kinds.GLOO)
    if _has_nccl:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        nccl = dist.ProcessGroupNCCL(PrefixStore("cuda", store), rank, size, options)
        group._register_backend(torch.device("cuda"), kinds.NCCL, nccl)
        group._set_default_backend(kinds.NCCL)
    elif torch.cuda.is_available():
        group._register_backend(torch.device("cuda"), kinds.GLOO, gloo)
    return group, listeners


def register() -> None:
    """Let torch.distributed use the backend `BACKEND`. You may call it twice. Not collective."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, devices=["cpu", "cuda"])


def presume() -> None:
    """Make fake groups from now on, because this process has no rank yet. Not collective."""
    global _presumes
    _presumes = True


def _create(store: Store, rank: int, size: int, timeout: timedelta) -> ExchangeableGroup:
    if _presumes:
        return ExchangeableGroup(rank, size, _fake(rank, size))
    _meet(store, size, timeout)
    return ExchangeableGroup(rank, size, *connect(store, rank, size, timeout))


def _meet(store: Store, size: int, timeout: timedelta) -> None:
    """Wait until all ranks are here, because in gloo nobody would hear of a loss meanwhile."""
    dropped_before, end = _drops, time.monotonic() + timeout.total_seconds()
    if store.add("here", 1) == size:
        store.set("all are here", "")
    while not store.check(["all are here"]):
        if _drops != dropped_before:
            raise ConnectionDropped("a rank was lost while a process group was made")
        if time.monotonic() > end:
            raise dist.DistStoreError(f"{store.add('here', 0)} of {size} ranks have come to a process group within "
                                      f"{timeout.total_seconds():g} s")  # fmt: skip
        time.sleep(_LOOK_S)


def _fake(rank: int, size: int) -> ProcessGroup:
    made: Any = FakeProcessGroup  # torch declares a wrong type for it
    group: ProcessGroup = made._create_internal(rank, size, made.Options())
    return group


def groups() -> list[ExchangeableGroup]:
    """Give all groups of this process. Not collective."""
    return list(_groups.values())


def drop_all() -> None:
    """Drop the connections of all groups of this process. Not collective."""
    global _drops
    _drops += 1
    for group in list(_groups.values()):
        group.drop()


def cut_all() -> None:
    """Cut all groups of this process. Not collective; any thread."""
    global _drops
    _drops += 1
    for group in list(_groups.values()):
        group.cut()


def _wait_until_quiet() -> None:
    """Wait until gloo cannot write to tensors any more: its calls have ended, or its threads sleep forever."""
    end, asleep_since = time.monotonic() + _QUIET_S, 0.0
    while any(work.has_memory for work in _interrupted):
        now = time.monotonic()
        if not _threads_sleep():
            asleep_since = 0.0
        elif not asleep_since:
            asleep_since = now
        elif now - asleep_since > _ASLEEP_S:  # in a send on closed connections, which gloo never ends
            break
        if now > end:
            raise TimeoutError(f"gloo has not ended the calls that were cut {_QUIET_S:g} s ago: it may still write to "
                               "tensors")  # fmt: skip
        time.sleep(_LOOK_S)
    _interrupted.clear()


def _forget_connections() -> None:
    global _presumes
    _presumes = False
    drop_all()
    _wait_until_quiet()
    while _left:
        _left.pop().set()


def exchange_all(store: Store, timeout: timedelta) -> None:
    """Connect all groups of this process again. Collective over all ranks, which must have made the same groups."""
    _forget_connections()
    for name, group in sorted(_known_to_all().items()):
        group.exchange(PrefixStore(name, store), timeout)


def _known_to_all() -> dict[str, ExchangeableGroup]:
    """Give all groups by a name that is the same on all of their ranks. Torch's names follow from earlier ranks."""
    named: dict[str, ExchangeableGroup] = {}
    for group in list(_groups.values()):  # in the order in which all ranks have made them
        ranks = ranks_of(group)
        digest = hashlib.sha1(str(ranks).encode(), usedforsecurity=False).hexdigest()
        number = sum(name.startswith(digest) for name in named)  # torch may make several groups of the same ranks
        named[f"{digest} {number:06}"] = group
    return named


# All groups and wrappers of a training, as `mlflash.keep_alive` uses them.


class TorchGroups:
    """All process groups of this process, see `mlflash.run.decider_link`.

    Args:
        timeout: timeout of the collectives of torch.distributed.
    """

    def __init__(self, timeout: timedelta):
        self._timeout = timeout
        self._store: dist.TCPStore | None = None
        self._meets: tuple[str, int] | None = None  # where the store is
        progress.waits = _waits
        self._unit: tuple[tuple[str, ...], int] | None = None  # as it was when these groups were there
        self._has_other_ranks = False  # whether models have the shards of other ranks

    def drop(self) -> None:
        cut_all()
        if self._meets:
            shut_down({self._meets})

    def connect(self, seat: Seat, share: Callable[[str, str | None], str]) -> None:
        exchange_all(self._open_store(seat, share), self._timeout)

    def _open_store(self, seat: Seat, share: Callable[[str, str | None], str]) -> dist.Store:
        if seat.rank == 0:
            host = own_address(False, os.environ)
            self._store = dist.TCPStore(host, 0, None, True, _MEETS, wait_for_workers=False)
            share("torch", f"{host},{self._store.port}")
            self._meets = host, self._store.port
        else:
            host, _, port = share("torch", None).rpartition(",")
            self._meets = host, int(port)
            self._store = dist.TCPStore(host, int(port), None, False, _MEETS)
        return dist.PrefixStore(f"round {seat.round}", self._store)

    def renew(self, seat: Seat, share: Callable[[str, str | None], str]) -> None:
        if sharded := instances(FSDPModule):
            for module in sharded:
                let_go(module)
            del sharded, module
            gc.collect()
        if wrapped := wrapped_models():
            raise ConfigError("a wrapped model of an earlier call still exists, and would take part in this one: make "
                              "wrapped models (DDP, FSDP2) inside the function that keep_alive calls, and keep neither "
                              "them nor the trainer elsewhere", found=type(wrapped[0]).__name__)  # fmt: skip
        global _all_ranks
        _all_ranks, store = seat.size, self._open_store(seat, share)
        _forget_connections()
        if dist.is_initialized():  # otherwise another rank was lost at this point
            dist.destroy_process_group()
        dist.init_process_group(BACKEND, rank=seat.rank, world_size=seat.size, timeout=self._timeout, store=store)

    def forget_step(self) -> None:
        models = sorted(wrapped_models(), key=sort_key)
        known = [buckets_of(model) for model in models]
        store = dist.PrefixStore("buckets", self._store)
        store.set(str(dist.get_rank()), json.dumps(known))
        for rank in range(dist.get_world_size()):  # a process that had no rank before does not know the buckets
            if any(map(any, known)):
                break
            known = json.loads(store.get(str(rank)))
        for model, buckets in zip(models, known, strict=True):
            forget_step(model, buckets)
        if self._has_other_ranks:
            reshard(models)
            self._has_other_ranks = False

    def unit(self) -> int:
        names = tuple(_groups)
        if self._unit is None or self._unit[0] != names:  # it looks at all objects, which takes a quarter of a second
            self._unit = names, unit(groups(), wrapped_models())
        return self._unit[1]

    def take(self, rank: int, size: int) -> None:
        global _all_ranks
        _all_ranks, all_ranks = size, dist.get_world_size()
        if rank == dist.get_rank() and size == all_ranks:
            return
        is_other = _presumes and rank != dist.get_rank()
        if is_other and (any(group.size() != all_ranks for group in groups()) or instances(DeviceMesh)):
            begin_anew(rank)
        models = wrapped_models()
        # If a round ended before models had their new shards, they fit to the ranks before, and have not run since.
        if size != all_ranks and not self._has_other_ranks and not unit(groups(), models):
            raise MlflashError("the number of ranks cannot change any more, since the training has made a distributed "
                               "tensor or a mesh of its own")  # fmt: skip
        meshes = meshes_of(models)
        places = [(group, *place(group, meshes, rank, size)) for group in groups()]
        for group, rank_in_group, ranks in places:
            group.take(rank_in_group, ranks)
        forget_meshes()
        self._has_other_ranks = True


def _waits() -> bool:
    """Whether gloo still runs a collective of this process. Any thread."""
    return any(not work.is_completed() for group in groups() for work in list(group._works))


def init_process_group(rank: int, size: int, timeout: timedelta, backend: str | None) -> None:
    """Set up torch.distributed with groups whose connections can be replaced.

    Collective, but a spare, which has no rank, calls it alone.

    Args:
        rank, size: of this process; a spare presumes them.
        timeout: timeout of each call.
        backend: one of `BACKENDS`.
    """
    global _all_ranks, _has_nccl
    _all_ranks = size
    _has_nccl = backend != "gloo" and torch.cuda.is_available() and dist.is_nccl_available()
    if not _has_nccl and backend == "nccl":
        raise ConfigError("there is no NCCL for this backend", expected="a GPU and NCCL", found=backend)
    if os.environ.get(_ON_ERRORS, "0") != "0":
        log.warning("mlflash sets %s=%s to 0: otherwise PyTorch would end this process when another one is lost",
                    _ON_ERRORS, os.environ[_ON_ERRORS])  # fmt: skip
    # If a peer dies, NCCL's watchdog ends the process (1, 3) or only the wait (2). After the latter, training would go
    # on and save with wrong sums. Here the process that decides about the round ends the wait.
    os.environ[_ON_ERRORS] = "0"
    register()
    store = None  # that of MASTER_ADDR
    if is_spare():
        presume()
        store = dist.HashStore()
    dist.init_process_group(BACKEND, rank=rank, world_size=size, timeout=timeout, store=store)
    registered_groups[:] = [TorchGroups(timeout)]


# The result of a collective of gloo, with a wait that can be interrupted, whatever gloo is doing. If a connection
# fails while bytes are queued, gloo does not wake the callers that wait to send them (`Pair::signalException` in
# gloo/transport/tcp/pair.cc skips unbound buffers in `tx_`). They wait for gloo's timeout, which is long in training.
# So a wait here does not wait for gloo, but for a future. Either gloo or an interruption completes the future.
# Source: torchft's managed work, which is also a `torch.distributed.Work` written in Python.


_FAILED = "failed"


class InterruptibleWork(dist.Work):
    """A running collective, send or receive."""

    def __init__(self, work: dist.Work):
        super().__init__()
        self._work = work
        self._lock = threading.Lock()
        self._ended: Future[Any] | None = None  # completed with a result, or `_FAILED`
        self._future: Future[Any] | None = None  # follows `_ended`, and raises the error
        self._is_over = False
        # What is raised are copies: a future of gloo may hold this work, and must not hold the frames of the training.
        self._error: Exception | None = None
        self._why: Exception | None = None

    def interrupt(self, why: Exception) -> None:
        """Make all waits for it, current and later ones, raise an error. Not collective; any thread."""
        with self._lock:
            self._why = self._why or why
        self._end(_FAILED, why)

    def get_future(self) -> Future[Any]:
        with self._lock:
            is_first = self._future is None
            if self._ended is None or self._future is None:
                self._ended = Future()
                self._future = self._ended.then(self._unwrap)  # C++ sees an error only if a callback raises it
            future, why = self._future, self._why
        if is_first and why is not None:
            self._end(_FAILED, why)
        elif is_first:
            try:
                self._work.get_future().add_done_callback(self._take)
            except RuntimeError:  # sends and receives have no future
                threading.Thread(target=self._wait_for_it, name="mlflash-work", daemon=True).start()
        return future

    def _take(self, theirs: Future[Any]) -> None:
        """Pass on gloo's result, on gloo's thread."""
        try:
            self._end(theirs.value())
        except Exception as error:
            self._end(_FAILED, error)

    def _wait_for_it(self) -> None:
        try:
            self._work.wait()
            self._end(None)
        except Exception as error:
            self._end(_FAILED, error)

    def _end(self, result: Any, error: Exception | None = None) -> None:
        with self._lock:
            if self._ended is None or self._is_over:
                return
            self._is_over, self._error, ended = True, error and error.with_traceback(None), self._ended
        ended.set_result(result)

    def _unwrap(self, ended: Future[Any]) -> Any:
        if self._error is not None:
            raise copy.copy(self._error)
        return ended.value()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until it has ended. With a timeout, gloo itself waits, which cannot be interrupted."""
        if self._why is not None:
            raise copy.copy(self._why)
        if timeout:
            return bool(self._work.wait(timeout))
        if self._work.is_completed():
            return bool(self._work.wait())
        self.get_future()
        assert self._ended is not None
        self._ended.wait()
        if self._error is not None:
            raise copy.copy(self._error)
        return True

    def is_completed(self) -> bool:
        return self._why is not None or self._is_over or bool(self._work.is_completed())

    def is_success(self) -> bool:
        return self._why is None and (self._error is None if self._is_over else bool(self._work.is_success()))

    @property
    def has_memory(self) -> bool:
        """Whether gloo may still write to the tensors."""
        return not self._work.is_completed()

    def result(self) -> Any:
        return self._work.result()

    def source_rank(self) -> int:
        return int(self._work._source_rank())

    _source_rank = source_rank

    def synchronize(self) -> None:
        self.wait()


# The connections of a gloo group, which are shut down because gloo itself cannot end calls that wait for a lost host.
# If a process is killed, its connections close and gloo raises an error. If a host is cut off, nothing arrives, and
# gloo waits for its timeout, which is long in training. The connections are found by the addresses at which the ranks
# listen. The ranks tell each other these through their store.


def _connect_gloo(store: Store, rank: int, size: int, timeout: timedelta) -> tuple[ProcessGroupGloo, set[Address]]:
    """Make the part with gloo of a group, as `connect` does; return it with the addresses at which its ranks listen."""
    before = _listening()
    group = ProcessGroupGloo(store, rank, size, min(timeout, _MEETS))
    group._set_default_timeout(timeout)
    store.set(f"listens/{rank}", json.dumps(sorted(_listening() - before)))
    addresses = store.multi_get([f"listens/{peer}" for peer in range(size)])
    return group, {(host, port) for listed in addresses for host, port in json.loads(listed)}


def shut_down(listeners: Collection[Address]) -> None:
    """Shut down all connections of this process to and from these addresses. Not collective; any thread."""
    for connection in _sockets():
        try:
            if _address(connection.getpeername()) in listeners or _address(connection.getsockname()) in listeners:
                connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # it is not connected
            continue


def _threads_sleep() -> bool:
    """Whether all of gloo's compute threads are waiting. Not collective."""
    for thread in os.listdir("/proc/self/task"):
        try:
            stat = read_stat(Path("/proc/self/task", thread))
        except OSError:  # it has ended
            continue
        if stat.name == _COMPUTES and stat.state != "S":
            return False
    return True


def _listening() -> set[Address]:
    return {
        _address(connection.getsockname())
        for connection in _sockets()
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    }


def _sockets() -> Iterator[socket.socket]:
    """Give all TCP sockets of this process, one after the other."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            connection = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # it was closed meanwhile
            continue
        with connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                yield connection


def _address(found: tuple[str, int]) -> Address:
    return found[0].removeprefix("::ffff:").partition("%")[0], found[1]
