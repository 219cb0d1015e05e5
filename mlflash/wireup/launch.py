"""What a trainer starts to have couriers: a zygote, a store that all ranks reach, and one courier after the other.

Each trainer makes one `Couriers`, for its whole life. The zygote of rank 0 serves the key-value store. The ranks learn
its address once (`rendezvous`), and agree on everything else through it (`epoch_agreement`). If a rank leaves the job,
it or its zygote tells the others (`epoch_agreement`). A job of one rank has no store and no MPI, only a courier.

If a zygote is killed, its courier ends, and the next epoch replaces both. The new zygote of rank 0 serves an empty
store at the same address with the same token, and the other ranks connect again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import select
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from ..errors import DeadlineExceeded, WorldMismatch
from ..events import Event
from ..placement.node import this_node
from . import courier_cores
from .epoch_agreement import Departure, Epoch, EpochAgreement, below
from .interfaces import own_address
from .launcher_variables import Launched, is_on_one_host, launched
from .pmi_server import ABORTS, new_epoch_name
from .rendezvous import rendezvous, way, who_am_i
from .store_client import left_s
from .zygote import NOT_UP
from .zygote_client import CourierEnd, ZygoteClient, ZygoteLost

_REAPED_S = 5.0  # limit for a courier to end, and for its zygote to report how


class CourierEnded(ConnectionError):
    """A courier has ended while it was needed; the text says how."""


class StartFailed(CourierEnded):
    """The first courier of a trainer has ended by itself before its MPI was up. The next one would do the same."""


@dataclasses.dataclass(frozen=True)
class RunningCourier:
    """A courier, as its trainer sees it."""

    number: int  # of its epoch, from 1
    epoch: str  # the name of its world of MPI, the same on all ranks
    nodes: tuple[int, ...]  # of each rank, numbered as they first appear
    trainer: socket.socket  # the trainer's end of the socket to it
    pid: int
    pidfd: int  # readable when it has ended
    cores: frozenset[int] | None = None  # that it was told to use; None: those of this process

    def close(self) -> None:
        """Close the socket and the pidfd, only once: `Couriers` does so before the next epoch."""
        self.trainer.close()
        os.close(self.pidfd)


def ended(end: CourierEnd) -> CourierEnded:
    """An error that says how a courier has ended."""
    how = f"exited with {end.status}" if end.signal is None else f"was killed by signal {end.signal}"
    why = f", since {end.why}" if end.why else ""
    return CourierEnded(f"courier {end.pid} of rank {end.rank} {how}{why}; its output may say more")


def check_start(running: RunningCourier, zygote: ZygoteClient) -> None:
    """Check whether a courier that has closed its socket had reached MPI.

    This only checks the first courier of a trainer. Later ones may have ended for other reasons. Raises StartFailed: it
    has ended by itself before MPI was up.
    """
    if running.number > 1 or zygote.is_up(running.pid):
        return
    poll = select.poll()
    poll.register(running.pidfd, select.POLLIN)
    if poll.poll(_REAPED_S * 1000):
        end = zygote.wait(running.pid, _REAPED_S)
        # The zygote kills a courier whose MPI has reported an abort, or has not come up. It has ended by itself.
        by_itself = end.signal is None or (end.why or "").startswith((ABORTS, NOT_UP))
        if not zygote.is_up(running.pid) and by_itself:
            raise StartFailed(str(ended(end)))


log = logging.getLogger("mlflash")


@dataclasses.dataclass(frozen=True)
class Meeting:
    """How ranks meet that already know who they are.

    Attributes:
        share: gives rank 0's text to all ranks, within a number of seconds.
        check: raises if the ranks have changed, so that waiting is useless.
        timeout_s: how long everything may take, in seconds.
        how: how they meet, in words.
        me: this rank; None: as `who_am_i` finds.
    """

    share: Callable[[str | None, float], str]
    check: Callable[[], None]
    timeout_s: float
    how: str = "mlflash run"
    me: Launched | None = None


class Couriers:
    """The couriers of this trainer; one runs at a time, from `next_epoch` on. Close it; it may be closed twice.

    Collective over all ranks of the job. One thread uses it, and no process that was forked from this one. If one rank
    raises, others wait for it until their deadline.

    Args:
        entry_point: ``module:function`` that each courier runs, importable without the trainer's script.
        environment: of this process, with the variables of its launcher.
        node: sets apart ranks of one host, as if they were on several; "": they are on one node.
        directory: a private directory of this user, where ranks of one host may meet; None: they meet by MASTER_ADDR.
        host: the address of rank 0's host at which the other ranks reach it; None: find it out.
        output: where couriers print to, open until `close`; None: where this process prints to.
        zygote: of this process, with that entry point; None: start it here.
        own_cores: whether couriers get cores on which no trainer runs.
        meeting: how the ranks meet; None: as `rendezvous` finds possible.

    Attributes:
        met: how the ranks found each other, in words.
        freed: what ranks had seen freed when the newest courier was forked.

    Raises:
        DeadlineExceeded: some ranks, those in ``ranks``, have not come.
        WorldMismatch: the ranks cannot find each other, or contradict each other.
        UnsafePath: the directory is somebody else's, or open to others.
        ZygoteLost: the zygote could not start; its output says why.
        ZygoteRefused: the zygote could not fork, or could not serve the store.
    """

    def __init__(
        self,
        entry_point: str,
        environment: Mapping[str, str],
        timeout_s: float,
        *,
        node: str = "",
        directory: Path | None = None,
        host: str | None = None,
        output: IO[Any] | None = None,
        zygote: ZygoteClient | None = None,
        own_cores: bool = False,
        meeting: Meeting | None = None,
    ):
        self._me = who_am_i(environment) if meeting is None or meeting.me is None else meeting.me
        self.rank, self.size = self._me.rank, self._me.size
        how = way(environment, self._me) if meeting is None else meeting.how
        self.met = f"{self.size} ranks met by {how}" if self.size > 1 else "one rank"
        self._entry_point, self._node, self._own_cores = entry_point, " ".join(this_node(name=node)), own_cores
        self._seat = courier_cores.own_seat(environment).to_text() if own_cores else ""
        self.freed: frozenset[str] = frozenset()
        self._number = 0  # the newest epoch
        self._running: RunningCourier | None = None
        self._agreement: EpochAgreement | None = None  # if there are several ranks
        self._ended = Event()  # used if there is no store
        self._has_departed = self._is_given_up = False
        with contextlib.ExitStack() as failed:
            self._start_zygote = functools.partial(ZygoteClient, [entry_point], environment, output, mpi=self.size > 1)
            self.zygote = self._start_zygote() if zygote is None else zygote
            failed.callback(self.close)
            if self.size > 1:
                found: Callable[[str | None, float], str] = lambda text, left: rendezvous(
                    environment, self._me, text, directory, left
                )
                self._meet(environment, meeting or Meeting(found, lambda: None, timeout_s), host, timeout_s)
            failed.pop_all()

    @property
    def courier(self) -> RunningCourier:
        """The newest courier."""
        if self._running is None:
            raise CourierEnded("there is no courier: no epoch was started, or the last one could not be")
        return self._running

    def _meet(self, environment: Mapping[str, str], meeting: Meeting, host: str | None, timeout_s: float) -> None:
        end, text = time.monotonic() + timeout_s, None
        if self.rank == 0:
            here = host or own_address(self._are_on_one_host(environment), environment)
            (address, port), token = self.zygote.serve(here, self.size, timeout_s)
            text = f"{address},{port},{token}"
        told = meeting.share(text, left_s(end)).split(",")
        if len(told) != 3 or not told[1].isdecimal():
            raise WorldMismatch("rank 0 sent no address of a key-value store", found=str(told)[:80])
        store = told[0], int(told[1])

        def check() -> None:
            self._check()
            meeting.check()

        self._agreement = EpochAgreement(self.rank, self.size, self._node, self._seat, store, told[2], end, check)

    def _are_on_one_host(self, environment: Mapping[str, str]) -> bool:
        """Whether the launcher says that all these ranks, which may be some of its own, are on this host."""
        try:
            whole = launched(environment)
        except WorldMismatch:  # variables were set for a part of the ranks
            return False
        is_part = whole.size > self.size
        return is_on_one_host(environment, whole if is_part else self._me)

    def next_epoch(self, timeout_s: float, freed: Sequence[str] = ()) -> RunningCourier:
        """Have a courier forked, in a world of MPI with those of all other ranks, after the end of the last one.

        Collective. A courier that still runs is killed first, and its socket and pidfd are closed. The call returns
        when the courier is forked; `wait_up` waits for its MPI. If that is not up ``timeout_s`` after the fork, the
        courier is killed. After DeadlineExceeded the call may be made again. ``freed``: what this rank has seen freed.

        Raises:
            DeadlineExceeded: some ranks, those in ``ranks``, have not called it.
            CourierEnded: the courier has ended at once.
            RankDeparted: a rank has left the job.
            ZygoteLost, ZygoteRefused: the zygote of this rank cannot start, fork, or serve the store again.
        """
        end = time.monotonic() + timeout_s
        try:
            self._end_courier(timeout_s)
            self.zygote.ask(0, left_s(end))  # a rank that could not fork must not say that it has come
        except ZygoteLost:
            self._check()
            self._replace_zygote(end)
        agreement, store, token = self._agreement, None, ""
        epoch: Epoch | None = None
        while epoch is None:
            number = self._number + 1
            if agreement is None:
                epoch = Epoch(new_epoch_name(number), (0,))
            else:
                epoch, store, token = agreement.agree(number, end, timeout_s, freed), agreement.address, agreement.token
            self._number = number
        self.freed = epoch.freed
        cores = self._choose_cores(end)
        mine, its = socket.socketpair()
        with contextlib.ExitStack() as failed, its:
            failed.callback(mine.close)
            pid = self.zygote.fork(
                self._entry_point, epoch.name, self.rank, epoch.nodes, store, token, its.fileno(),
                left_s(end), timeout_s, cores, epoch.reads,
            )  # fmt: skip
            pidfd = self._open(pid, left_s(end))
            failed.pop_all()
        self._running = RunningCourier(number, epoch.name, epoch.nodes, mine, pid, pidfd, cores)
        return self._running

    def announce_end(self, timeout_s: float) -> None:
        """Tell all ranks that this epoch is over, because this rank's courier has ended. Not collective; any thread.

        Raises:
            StoreLost, DeadlineExceeded: they could not be told.
        """
        if self._agreement is None:
            self._ended.set()
        elif self._number:
            self._agreement.put([(below(self._number) + "ended", str(self.rank))], timeout_s)

    def depart(self, why: str, timeout_s: float, ends_job: bool = True) -> None:
        """Tell all ranks that this one leaves the job permanently. Not collective; any thread.

        ``ends_job``: whether the other ranks must end, too. Raises StoreLost or DeadlineExceeded: they could not be
        told.
        """
        if self._agreement is not None:
            self._has_departed = True
            self._agreement.put(Departure(self.rank, why, ends_job).puts(self._number), timeout_s)

    @property
    def host(self) -> str:
        """The numeric address at which all ranks reach the host of rank 0."""
        return self._agreement.address[0] if self._agreement is not None else own_address(True, {})

    def share(self, text: str | None, timeout_s: float) -> str:
        """Give rank 0's text to all ranks. Collective; one thread may do this in parallel to that of the epochs.

        Raises:
            StoreLost, DeadlineExceeded: rank 0 has ended, or did not come.
        """
        if self._agreement is None:
            return text or ""
        return self._agreement.share(text, timeout_s)

    def wait_for_end(self) -> None:
        """Wait until a rank has announced the end of this epoch, see `EpochAgreement.wait_for_end`."""
        if self._agreement is None:
            self._ended.wait()
            self._ended.clear()
        else:
            self._agreement.wait_for_end(self._number)

    def wait_up(self, timeout_s: float) -> None:
        """Wait until the newest courier has initialized MPI. Not collective, but MPI_Init is.

        Raises:
            DeadlineExceeded: it takes too long; ``ranks`` are those whose couriers were not forked.
            CourierEnded: it has ended.
            ZygoteLost: the zygote of this rank has ended.
        """
        courier = self.courier
        try:
            is_up = self.zygote.wait_up(courier.pid, timeout_s)
        except DeadlineExceeded as exceeded:
            agreement = self._agreement
            missing = (agreement.missing(f"{courier.epoch}/started/") if agreement is not None else None) or []
            if self.rank in missing:  # this rank was forked, so the keys that tell it were deleted: the last one is up
                missing = []
            which = f"; no courier was forked on {len(missing)} of {self.size} ranks" if missing else ""
            raise DeadlineExceeded(f"{exceeded.message}{which}", rank=self.rank, ranks=missing) from None
        if not is_up:
            raise ended(self.zygote.ended[courier.pid])

    def give_up(self) -> None:
        """End all waits for other ranks, and kill the zygote. `close` must follow. Any thread."""
        self._is_given_up = True
        self.zygote.process.kill()

    def _check(self) -> None:
        if self._is_given_up:
            raise CourierEnded("these couriers were given up")

    def close(self, timeout_s: float = 10.0, kill: bool = True) -> None:
        """End the courier, if there is one, and the zygote.

        On rank 0 this ends the store: no rank can start an epoch any more. If they have not ended by themselves after
        ``timeout_s``, they are killed. Without ``kill`` the courier is only told that nothing more comes, and in the
        end all ranks hear that this one has left the job.
        """
        if self._running is not None and not kill:
            with contextlib.suppress(OSError):
                self._running.trainer.shutdown(socket.SHUT_WR)
        self.zygote.stop(timeout_s, kill, tell=not kill and not self._has_departed)
        if self._agreement is not None:
            self._agreement.close()
        if self._running is not None:
            self._running.close()
            self._running = None
        self._ended.set()  # nobody waits for it any more

    # One epoch

    def _end_courier(self, timeout_s: float) -> None:
        if self._running is None:
            return
        end = time.monotonic() + timeout_s
        if self._running.pid in self.zygote.running:
            self.zygote.kill(self._running.pid, timeout_s)
            self.zygote.wait(self._running.pid, left_s(end))
        self._running.close()
        self._running = None

    def _replace_zygote(self, end: float) -> None:
        if self._running is not None:  # the kernel kills the courier; only then can its shared memory be removed
            poll = select.poll()
            poll.register(self._running.pidfd, select.POLLIN)
            poll.poll(left_s(end) * 1000)
            self._running.close()
            self._running = None
        self.zygote.stop(0)
        self.zygote = self._start_zygote()
        self._check()
        if self.rank == 0 and self._agreement is not None:
            host, port = self._agreement.address
            self.zygote.serve(host, self.size, left_s(end), port, self._agreement.token)
        self.zygote.ask(0, left_s(end))

    def _choose_cores(self, end: float) -> frozenset[int] | None:
        """Choose the cores of the next courier. If they are unknown or invalid, it runs where its trainer does."""
        if not self._own_cores:
            return None
        try:
            alone = {str(self.rank): self._seat}
            told = alone if self._agreement is None else self._agreement.seats(self._number, end)
            return courier_cores.choose_among(told, str(self.rank))
        except ValueError as problem:
            log.debug("no cores are chosen for the courier of rank %d: %s", self.rank, problem)
            return None

    def _open(self, pid: int, timeout_s: float) -> int:
        """Open a pidfd of a courier. Its number is not reused before its zygote, which has not yet, reaps it."""
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
