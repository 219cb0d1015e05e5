"""What a trainer starts to have couriers: a zygote, a store that all ranks reach, and one courier after the other.

Each trainer makes one `Couriers`, for as long as it lives. The zygote of rank 0 serves the key-value store; the ranks
learn where it is once (`rendezvous`), and agree on everything else through it. In the store, epoch N of the couriers
has ``launch/N/node/RANK``, the node of a rank that wants this epoch, and ``launch/N/all``: as soon as all ranks want
it, rank 0 puts there which it is, ``[name, nodes]``; and ``launch/N/ended``, put by a rank whose courier has ended.
Below ``launch/N/cores/HOST/`` stands what each rank of a host may run on, for `courier_cores`. A rank that leaves the
job tells the others so (`departures`), or its zygote does. A job of one rank has no store and no MPI, only a courier.

A zygote that was killed, which ends its courier, is replaced by the next epoch; that of rank 0 then serves an empty
store at the same address with the same token, to which the others connect anew.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from ..errors import DeadlineExceeded, WorldMismatch
from . import courier_cores
from .departures import Departure, below, check_departure
from .launcher_variables import is_on_one_host
from .own_address import own_address
from .pmi_server import new_epoch_name
from .process_mapping import Block, blocks, name_of_host, name_of_node, nodes_of
from .rendezvous import rendezvous, who_am_i
from .running_courier import CourierEnded, RunningCourier, ended
from .store_client import StoreClient, StoreLost, StoreRefused, connect
from .zygote_client import ZygoteClient, ZygoteLost

log = logging.getLogger("mlflash")

_FOREVER_S = 1e6  # as long as poll can wait, nearly
_ASK_S = 5.0  # for one more answer, when a deadline has passed, to say why


class Couriers:
    """The couriers of this trainer, of which one runs at a time. Close it; it may be closed twice.

    Collective over all ranks of the job. One thread uses it, and no process that was forked from this one. Where one
    rank raises, others wait for it until their deadline.

    Args:
        entry_point: ``module:function`` that each courier runs, importable without the trainer's script.
        environment: of this process, with what its launcher said.
        timeout_s: how long all of it may take, seconds.
        node: the number of this rank's node, where nodes are emulated; None: the node is the host.
        directory: of this user alone, where ranks of one host may meet; None: they meet by MASTER_ADDR.
        host: the address of rank 0's host at which the others reach it; found out if None.
        output: where couriers print to, open until `close`; where this process does if None.
        zygote: of this process, with that entry point; it is started here if None.
        cores: of couriers: "auto", "inherit", or such as "0-3,8".

    Attributes:
        rank: of this process.
        size: how many ranks there are.
        courier: the newest, which was forked and is on its way to MPI.

    Raises:
        DeadlineExceeded: ranks have not come; ``ranks`` are those.
        WorldMismatch: the ranks cannot find each other, or contradict each other.
        UnsafePath: the directory is somebody else's, or open to others.
        ZygoteLost: the zygote could not start; what it printed says why.
        ZygoteRefused: it could not fork, or serve the store.
    """

    def __init__(
        self,
        entry_point: str,
        environment: Mapping[str, str],
        timeout_s: float,
        *,
        node: int | None = None,
        directory: Path | None = None,
        host: str | None = None,
        output: IO[Any] | None = None,
        zygote: ZygoteClient | None = None,
        cores: str = courier_cores.INHERIT,
    ):
        end = time.monotonic() + timeout_s
        self._me = who_am_i(environment)
        self.rank, self.size = self._me.rank, self._me.size
        self._entry_point, self._node, self._cores = entry_point, name_of_node(node), cores
        self._seat = "" if cores == courier_cores.INHERIT else courier_cores.own_seat(environment).to_text()
        self._number = 0  # of the newest epoch
        self._running: RunningCourier | None = None
        self._store: StoreClient | None = None
        self._address: tuple[str, int] | None = None
        self._token = ""
        self._shared = itertools.count()
        self._ended = threading.Event()  # where there is no store
        self._has_departed = False
        with contextlib.ExitStack() as failed:
            self._start_zygote = functools.partial(ZygoteClient, [entry_point], environment, output, mpi=self.size > 1)
            self.zygote = self._start_zygote() if zygote is None else zygote
            failed.callback(self.close)
            if self.size > 1:
                self._meet(environment, directory, host, timeout_s)
            self.next_epoch(_left(end))
            failed.pop_all()

    @property
    def courier(self) -> RunningCourier:
        """The newest courier. Not collective."""
        if self._running is None:
            raise CourierEnded("there is no courier: the last epoch could not be started")
        return self._running

    def _meet(self, environment: Mapping[str, str], directory: Path | None, host: str | None, timeout_s: float) -> None:
        end, text = time.monotonic() + timeout_s, None
        if self.rank == 0:
            here = host or own_address(is_on_one_host(environment, self._me), environment.get("MASTER_ADDR"))
            (address, port), token = self.zygote.serve(here, self.size, timeout_s)
            text = f"{address},{port},{token}"
        told = rendezvous(environment, self._me, text, directory, _left(end))
        try:
            address, number, self._token = told.split(",")
            self._address = (address, int(number))
        except ValueError:
            raise WorldMismatch("rank 0 has said no address of a key-value store", found=told[:80]) from None
        self._store = connect(self._address, self._token, end)

    def next_epoch(self, timeout_s: float) -> RunningCourier:
        """Have a courier forked that has a world of MPI with those of all other ranks, after the end of the last one.

        Collective. What still runs is killed first; its socket and pidfd are closed. It returns when the courier is
        forked; `wait_up` waits for its MPI. After DeadlineExceeded it may be called again.

        Args:
            timeout_s: how long it may take, seconds. The courier is killed if this process ends, and its MPI is not
                up as long thereafter.

        Raises:
            DeadlineExceeded: ranks have not called it; ``ranks`` are those.
            CourierEnded: the courier has ended at once.
            RankDeparted: a rank has left the job.
            ZygoteLost: the zygote of this rank cannot start.
            ZygoteRefused: it could not fork, or serve the store again.
        """
        end = time.monotonic() + timeout_s
        try:
            self._end_courier(timeout_s)
            self.zygote.ask(0, _left(end))  # a rank that could not fork does not say that it has come
        except ZygoteLost:
            self._replace_zygote(end)
        name, nodes = self._agree(end, timeout_s)
        self._number += 1
        cores = self._choose_cores(end)
        mine, its = socket.socketpair()
        with contextlib.ExitStack() as failed, its:
            failed.callback(mine.close)
            pid = self.zygote.fork(
                self._entry_point, name, self.rank, nodes, self._address, self._token, its.fileno(),
                _left(end), timeout_s, cores,
            )  # fmt: skip
            pidfd = self._open(pid, _left(end))
            failed.pop_all()
        self._running = RunningCourier(self._number, name, nodes, mine, pid, pidfd, cores)
        return self._running

    def announce_end(self, timeout_s: float) -> None:
        """Tell all ranks that this epoch is over, as its courier of this rank has ended. Not collective; any thread.

        Raises:
            StoreLost, DeadlineExceeded: they could not be told.
        """
        if self._address is None:
            self._ended.set()
        else:
            self._put([(below(self._number) + "ended", str(self.rank))], timeout_s)

    def depart(self, why: str, timeout_s: float) -> None:
        """Tell all ranks that this one leaves the job by an exception, and that they are to end as well.

        Not collective; any thread.

        Args:
            why: the exception, as text.
            timeout_s: how long each message may take, seconds.

        Raises:
            StoreLost, DeadlineExceeded: they could not be told.
        """
        if self._address is not None:
            self._has_departed = True
            self._put(Departure(self.rank, why, ends_job=True).puts(self._number), timeout_s)

    def _put(self, puts: Sequence[tuple[str, str]], timeout_s: float) -> None:
        assert self._address is not None
        with contextlib.closing(StoreClient(self._address, self._token)) as store:
            for key, value in puts:
                store.put(key, value, timeout_s)

    @property
    def host(self) -> str:
        """Where all ranks reach the host of rank 0, in figures. Not collective."""
        return self._address[0] if self._address is not None else own_address(True)

    def share(self, text: str | None, timeout_s: float) -> str:
        """Give rank 0's text to all ranks. Collective; one thread does so, beside that of the epochs.

        Raises:
            StoreLost, DeadlineExceeded: rank 0 has ended, or did not come.
        """
        if self._address is None:
            return text or ""
        key = f"shared/{next(self._shared)}"
        with contextlib.closing(StoreClient(self._address, self._token)) as store:
            if self.rank == 0:
                store.put(key, text or "", timeout_s)
            return store.get(key, timeout_s)

    def wait_for_end(self) -> None:
        """Wait until a rank has announced the end of this epoch, however long that takes. Not collective.

        Raises:
            RankDeparted: a rank has left the job.
            StoreLost: nobody can announce anything any more.
        """
        if self._store is None:
            self._ended.wait()
            self._ended.clear()
            return
        while True:
            try:
                told = self._store.get(below(self._number) + "ended", _FOREVER_S)
            except DeadlineExceeded:
                continue
            check_departure(told)
            return

    def wait_up(self, timeout_s: float) -> None:
        """Wait until the newest courier has initialised MPI. Not collective, but MPI_Init is.

        Raises:
            DeadlineExceeded: it has not; ``ranks`` are those whose couriers were not forked.
            CourierEnded: it has ended.
            ZygoteLost: the zygote of this rank has ended.
        """
        courier = self.courier
        try:
            is_up = self.zygote.wait_up(courier.pid, timeout_s)
        except DeadlineExceeded as exceeded:
            missing = self._missing(f"{courier.epoch}/started/")
            which = f"; no courier was forked on {len(missing)} of {self.size} ranks" if missing else ""
            raise DeadlineExceeded(f"{exceeded.message}{which}", rank=self.rank, ranks=missing) from None
        if not is_up:
            raise ended(self.zygote.ended[courier.pid])

    def close(self, timeout_s: float = 10.0, kill: bool = True) -> None:
        """End the courier if there is one, and the zygote. Not collective.

        On rank 0 this ends the store: no rank can start an epoch any more.

        Args:
            timeout_s: how long they may take to end well, seconds; they are killed then.
            kill: whether the courier is killed at once; if not, it is only told that there is nothing more to come, and
                all ranks hear in the end that this one has left the job.
        """
        if self._running is not None and not kill:
            with contextlib.suppress(OSError):
                self._running.trainer.shutdown(socket.SHUT_WR)
        self.zygote.stop(timeout_s, kill, tell=not kill and not self._has_departed)
        if self._store is not None:
            self._store.close()
        if self._running is not None:
            self._running.close()
            self._running = None

    # One epoch

    def _end_courier(self, timeout_s: float) -> None:
        if self._running is None:
            return
        end = time.monotonic() + timeout_s
        if self._running.pid in self.zygote.running:
            self.zygote.kill(self._running.pid, timeout_s)
            self.zygote.wait(self._running.pid, _left(end))
        self._running.close()
        self._running = None

    def _replace_zygote(self, end: float) -> None:
        if self._running is not None:  # which the kernel kills; its shared memory can be removed only then
            poll = select.poll()
            poll.register(self._running.pidfd, select.POLLIN)
            poll.poll(_left(end) * 1000)
            self._running.close()
            self._running = None
        self.zygote.stop(0)
        self.zygote = self._start_zygote()
        if self.rank == 0 and self._address is not None:
            self.zygote.serve(self._address[0], self.size, _left(end), self._address[1], self._token)
        self.zygote.ask(0, _left(end))

    def _agree(self, end: float, timeout_s: float) -> tuple[str, tuple[int, ...]]:
        """Agree on the next epoch: its name, and the node of each rank."""
        number = self._number + 1
        if self._store is None:
            return new_epoch_name(number), (0,)
        prefix = below(number)
        try:
            while True:
                try:
                    if self._cores != courier_cores.INHERIT:
                        self._store.put(f"{prefix}cores/{name_of_host()}/{self.rank}", self._seat, _left(end))
                    self._store.put(f"{prefix}node/{self.rank}", self._node, _left(end))
                    if self.rank == 0:
                        self._gather(prefix, end)
                    told = self._store.get(f"{prefix}all", _left(end))
                    break
                except StoreLost:
                    assert self._address is not None
                    self._store.close()
                    self._store = connect(self._address, self._token, end)
        except DeadlineExceeded as exceeded:
            missing = self._missing(f"{prefix}node/")
            raise DeadlineExceeded(
                f"waited {timeout_s:g} s for all ranks to start epoch {number} of their couriers: "
                + (f"{len(missing)} of {self.size} have not come" if missing else "all have come, but too late"),
                rank=self.rank,
                ranks=missing,
            ) from exceeded
        check_departure(told)
        name, described = json.loads(told)
        return name, tuple(nodes_of([Block(*block) for block in described], self.size))

    def _choose_cores(self, end: float) -> frozenset[int] | None:
        """Choose where the next courier runs; what is not known or makes no sense leaves it where its trainer does."""
        if self._cores == courier_cores.INHERIT:
            return None
        try:
            here = f"{below(self._number)}cores/{name_of_host()}/"
            told = {str(self.rank): self._seat} if self._store is None else self._store.below(here, _left(end))
            return courier_cores.choose_among(self._cores, told, str(self.rank))
        except (StoreRefused, ValueError) as problem:
            log.debug("no cores are chosen for the courier of rank %d: %s", self.rank, problem)
            return None

    def _gather(self, prefix: str, end: float) -> None:
        """Wait for all ranks, and say which epoch it is. Rank 0 does this."""
        assert self._store is not None
        self._store.get(f"{prefix}node/{self.size - 1}", _left(end))  # most have come by then
        try:
            there = self._store.below(f"{prefix}node/", _left(end))
        except StoreRefused:  # more than one answer holds
            there = {}
        names = [there.get(str(rank)) or self._store.get(f"{prefix}node/{rank}", _left(end))
                 for rank in range(self.size)]  # fmt: skip
        if "" in names:  # one has left the job, and has said so to all
            return
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        epoch = new_epoch_name(self._number + 1)
        described = blocks([numbers[name] for name in names])
        # All have come here, so none needs what stands of the last epoch.
        before = below(self._number)
        if (last := self._store.look(f"{before}all", _left(end))) is not None:
            self._store.delete(f"{json.loads(last)[0]}/", _left(end))
            self._store.delete(before, _left(end))
        self._store.put(f"{prefix}all", json.dumps([epoch, described]), _left(end))

    def _missing(self, prefix: str) -> list[int]:
        """Which ranks have put nothing below this."""
        if self._store is None:
            return []
        try:
            there = self._store.below(prefix, _ASK_S)
        except (OSError, DeadlineExceeded):
            return []
        return [rank for rank in range(self.size) if str(rank) not in there]

    def _open(self, pid: int, timeout_s: float) -> int:
        """Open a pidfd of a courier. Its number is its own as long as its zygote, which waits for it, has not."""
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            pidfd = -1
        try:
            if pidfd >= 0 and self.zygote.ask(pid, timeout_s)["running"]:
                return pidfd
            raise ended(self.zygote.wait(pid, timeout_s))
        except BaseException:
            if pidfd >= 0:
                os.close(pidfd)
            raise


def _left(end: float) -> float:
    """Give how many seconds are left of a deadline, by time.monotonic."""
    return max(0.0, end - time.monotonic())
