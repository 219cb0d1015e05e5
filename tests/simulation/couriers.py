"""Courier processes: the real code of trainers and couriers, over sockets and epochs that are simulated.

Real is everything in `mlflash.courier` and `mlflash.channel`: connections, messages, sessions, restarts. Simulated is
what `mlflash.launch` does: it forks a courier for each rank and epoch, lets all ranks agree on the epoch, and tells the
others who has left.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import select
import socket
from collections import deque
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import machine
import mpi
from scheduler import Process, Scheduler

from mlflash.channel import channel, connection
from mlflash.courier import main as courier_main
from mlflash.errors import DeadlineExceeded
from mlflash.launch.agent_client import AgentLost, Departure, HubLost
from mlflash.launch.couriers import CourierEnded, RankDeparted, StartFailed
from mlflash.launch.rendezvous import Meeting, who_am_i

if TYPE_CHECKING:
    from history import History

_FIRST_FD = 1_000_000  # numbers of simulated descriptors
_LOOK_S = 1.0  # between two checks whether a wait is useless
_LINGERS_S = 4.0  # from the end of a trainer to that of its agent
_TOLD_S = 0.01  # until other ranks hear of an end, at the least


class Socket:
    """One end of a stream. What is sent arrives later, in parts."""

    def __init__(self, kernel: Scheduler, network_delay: Any):
        self._kernel, self._delay = kernel, network_delay
        self._arrived: deque[bytes] = deque()
        self._fds: list[int] = []
        self.peer: Socket
        self.owner: Process | None = None
        self.is_over = self.is_closed = False  # the peer sends nothing more; this end is closed
        self._last = 0.0
        WORLD.numbers += 1
        self._number = _FIRST_FD + WORLD.numbers

    def fileno(self) -> int:
        return self._number

    @property
    def is_readable(self) -> bool:
        return bool(self._arrived) or self.is_over

    def sendall(self, data: bytes, fds: list[int] | None = None) -> None:
        self._kernel.point("socket.send")
        if self.is_closed or self.peer.is_closed or (self.peer.owner is not None and not self.peer.owner.is_alive):
            raise BrokenPipeError("the other end is closed")
        random = self._kernel.random
        data = bytes(data)
        cuts = sorted({0, len(data), *([random.randrange(len(data) + 1)] if random.random() < 0.2 else [])})
        for first, last in itertools.pairwise(cuts):
            self._later(lambda part=data[first:last], given=fds if not first else None: self.peer._arrive(part, given))

    def _later(self, call: Any) -> None:
        self._last = max(self._last, self._kernel.now + self._delay())  # in order
        self._kernel.at(self._last, call)

    def _arrive(self, data: bytes, fds: list[int] | None = None) -> None:
        self._arrived.append(data)
        self._fds += fds or []
        self._tell()

    def _tell(self) -> None:
        if self.owner is not None:
            for task in WORLD.readers.pop(self, []):
                self._kernel.wake(task)
            self._kernel.tell_news(self.owner)

    def wait_readable(self) -> None:
        while not self.is_readable:
            task = self._kernel.current
            assert task is not None
            WORLD.readers.setdefault(self, []).append(task)
            self._kernel.block()

    def recv(self, _: int) -> bytes:
        self._kernel.point("socket.recv")
        self.wait_readable()
        if self.is_closed:
            raise OSError("this end is closed")
        return self._arrived.popleft() if self._arrived else b""

    def take_fds(self) -> list[int]:
        fds, self._fds = self._fds, []
        return fds

    def shutdown(self, _: int) -> None:
        self._later(self.peer.end)

    def end(self) -> None:
        self.is_over = True
        self._tell()

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.end()
            self._later(self.peer.end)


class Sockets:
    SHUT_WR = socket.SHUT_WR

    @staticmethod
    def send_fds(sock: Socket, parts: list[bytes], fds: list[int]) -> int:
        sock.sendall(parts[0], [os.dup(fd) for fd in fds])
        return len(parts[0])

    @staticmethod
    def recv_fds(sock: Socket, nbytes: int, _: int) -> tuple[bytes, list[int], int, None]:
        return sock.recv(nbytes), sock.take_fds(), 0, None


class Poll:
    """Stands for select.poll: a courier polls the socket to its trainer, and the pidfd of that."""

    def __init__(self) -> None:
        self._socket: Socket
        self._pidfd: int

    def register(self, watched: Any, _: int) -> None:
        if isinstance(watched, Socket):
            self._socket = watched
        else:
            self._pidfd = watched

    def poll(self) -> list[tuple[int, int]]:
        self._socket._kernel.point("poll")
        trainer = WORLD.trainers[self._pidfd]
        if trainer.is_alive:
            self._socket.wait_readable()
        ready = [self._socket.fileno()] if self._socket.is_readable else []
        return [(fd, select.POLLIN) for fd in [*ready, *([] if trainer.is_alive else [self._pidfd])]]


@dataclasses.dataclass
class Epoch:
    """One epoch of couriers.

    Attributes:
        came: the ranks whose trainers have come to it, and what each has seen freed.
        couriers: a process for each rank, once all have come.
        ended: whether a rank has announced its end.
    """

    number: int
    came: dict[int, list[str]] = dataclasses.field(default_factory=dict)
    couriers: list[Process] = dataclasses.field(default_factory=list)
    network: mpi.Network | None = None
    ended: bool = False


class World:
    """All couriers of a launch.

    Attributes:
        stores: what trainers know of each other, by the text that they have shared.
        trainers: by the number of their pidfd.
        newest: the newest couriers of each trainer.
        silent: processes whose node has died, so that nobody hears of their end.
        readers: tasks that wait for a socket.
    """

    def __init__(self) -> None:
        self.history: History
        self.kernel: Scheduler
        self.stores: dict[str, Store] = {}
        self.trainers: dict[int, Process] = {}
        self.newest: dict[Process, Couriers] = {}
        self.silent: set[Process] = set()
        self.readers: dict[Socket, list[Any]] = {}
        self.numbers = 0


class Store:
    """The hub of rank 0, at which the trainers of one meeting agree on epochs.

    Attributes:
        departures: ranks that have left the job.
        is_lost: whether its process has ended.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.epochs: dict[int, Epoch] = {}
        self.departures: list[Departure] = []
        self.waiters: list[Any] = []
        self.is_lost = False

    def tell(self) -> None:
        """Wake the trainers that wait for an epoch, or for its end."""
        waiters, self.waiters = self.waiters, []
        for task in waiters:
            WORLD.kernel.wake(task)

    def wait(self, end: float) -> None:
        task = WORLD.kernel.current
        assert task is not None
        self.waiters.append(task)
        WORLD.kernel.block(end)

    def lose(self) -> None:
        self.is_lost = True
        self.tell()

    def depart(self, departure: Departure) -> None:
        if all(departure.rank != other.rank for other in self.departures):
            self.departures.append(departure)
            self.tell()

    def check(self) -> None:
        if self.departures:
            raise RankDeparted(self.departures[0])


WORLD = World()


class Agent:
    """Stands for `mlflash.launch.agent_client.AgentClient`.

    Attributes:
        is_lost: whether it was closed.
        at_end: called then.
    """

    def __init__(self) -> None:
        self.is_lost = False
        self.at_end: list[Any] = []

    def check(self) -> None:
        if self.is_lost:
            raise AgentLost("the agent has ended")

    def close(self) -> None:
        if not self.is_lost:
            self.is_lost = True
            for call in self.at_end:
                call()


class Couriers:
    """Stands for `mlflash.launch.couriers.Couriers`."""

    def __init__(self, entry_point: str, environment: Any, timeout_s: float, *, agent: Agent,
                 meeting: Meeting | None = None, **more: Any):  # fmt: skip
        self._trainer = WORLD.kernel.current.process  # type: ignore[union-attr]
        me = who_am_i(environment) if meeting is None else meeting.me
        self.rank, self.size = me.rank, me.size
        self.met, self.freed, self._number = "simulated", frozenset[str](), 0
        self._running: Any = None
        self._is_given_up = False
        self.agent, text = agent, ""
        self._check_meeting = meeting.check if meeting is not None else lambda: None
        try:
            if meeting is not None:
                self.agent.check()
                assert meeting.share is not None
                text = meeting.share(None if self.rank else f"store {len(WORLD.stores)}", timeout_s)
            self._store = WORLD.stores.setdefault(text, Store(len(WORLD.stores)))
            WORLD.newest[self._trainer] = self
            self._watch_agent()
            self._check()
        except BaseException:
            self.agent.close()
            raise

    @property
    def courier(self) -> Any:
        if self._running is None:
            raise CourierEnded("there is no courier")
        return self._running

    def _watch_agent(self) -> None:
        self.agent.at_end.append(self._end_courier)
        if self.rank == 0:
            self.agent.at_end.append(self._store.lose)

    def _check(self) -> None:
        if self._is_given_up:
            raise CourierEnded("these couriers were given up")
        self._check_meeting()

    def _replace_agent(self) -> None:
        if self._is_given_up:
            raise CourierEnded("these couriers were given up")
        self.agent = Agent()
        self._watch_agent()
        self._store.is_lost &= self.rank != 0

    def next_epoch(self, timeout_s: float, freed: Any = ()) -> None:
        kernel, number, store = WORLD.kernel, self._number + 1, self._store
        self._kill()
        end = kernel.now + timeout_s
        kernel.point("epoch")
        if self.agent.is_lost:
            self._replace_agent()
        epoch = store.epochs.setdefault(number, Epoch(number))
        epoch.came[self.rank] = list(freed)
        store.tell()
        while len(epoch.came) < self.size:
            store.check()
            if kernel.now >= end:
                missing = sorted({*range(self.size)} - epoch.came.keys())
                raise DeadlineExceeded("some ranks have not come", ranks=missing)
            self._check()
            if store.is_lost:
                kernel.sleep(0.2)
            else:
                store.wait(min(end, kernel.now + _LOOK_S))
        if epoch.network is None:
            self._make(epoch)
        self.freed = frozenset(name for names in epoch.came.values() for name in names)
        self._number = number
        self.agent.check()
        self._fork(epoch)

    def _make(self, epoch: Epoch) -> None:
        history, kernel = WORLD.history, WORLD.kernel
        for rank in range(self.size):
            pid = 1000 * (history.launch.number + 1) + 100 * (epoch.number % 9) + 50 + 10 * self._store.number + rank
            epoch.couriers.append(Process(rank, pid, "courier", globals=machine.process_globals()))
        setting = history.setting
        epoch.network = mpi.Network(kernel, epoch.couriers, setting.pace, setting.has_errors)
        history.launch.networks.append(epoch.network)

    def _fork(self, epoch: Epoch) -> None:
        kernel, courier, trainer = WORLD.kernel, epoch.couriers[self.rank], self._trainer
        network = epoch.network
        assert network is not None
        courier.parent = trainer
        ours, theirs = Socket(kernel, network.delay), Socket(kernel, network.delay)
        ours.peer, theirs.peer, ours.owner, theirs.owner = theirs, ours, trainer, courier
        courier.at_death.append(lambda: theirs._later(ours.end))
        trainer.at_death.append(lambda: ours._later(theirs.end))
        pidfd = -trainer.pid
        WORLD.trainers[pidfd] = trainer
        machine.MPI.worlds[courier] = network.world(courier)
        running = SimpleNamespace(
            number=epoch.number, channel=ours, pid=courier.pid, cores=frozenset(), process=courier, is_up=False
        )
        forked = SimpleNamespace(channel=theirs, trainer_pidfd=pidfd, has_mpi=True, trains_on=frozenset(),
                                 tell_mpi_is_up=lambda: setattr(running, "is_up", True))  # fmt: skip

        def main() -> None:
            courier_main.run(forked)  # type: ignore[arg-type]
            kernel.exit(courier)

        self._running = running
        kernel.spawn(courier, "main", main)

    def _end_courier(self) -> None:
        if self._running is not None:
            WORLD.kernel.kill(self._running.process)

    def _kill(self) -> None:
        if self._running is not None:
            self._end_courier()
            self._running.channel.close()
            self._running = None

    def announce_end(self, timeout_s: float) -> None:
        epoch = self._store.epochs[self._number]
        WORLD.kernel.after(_TOLD_S, lambda: self._end(epoch))

    def _end(self, epoch: Epoch) -> None:
        epoch.ended = True
        self._store.tell()

    def wait_for_end(self) -> None:
        while not self._store.epochs[self._number].ended:
            self._store.check()
            self._check()
            if self._store.is_lost:
                raise HubLost("the hub has ended")
            self._store.wait(WORLD.kernel.now + _LOOK_S)

    def depart(self, why: str, timeout_s: float, ends_job: bool = True) -> None:
        WORLD.kernel.after(_TOLD_S, lambda: self._store.depart(Departure(self.rank, why, ends_job)))

    def give_up(self) -> None:
        self._is_given_up = True
        self.agent.close()

    def close(self, timeout_s: float = 10.0, kill: bool = True) -> None:
        if self._running is not None and not kill:
            self._running.channel.shutdown(socket.SHUT_WR)
            end = WORLD.kernel.now + timeout_s
            while self._running.process.is_alive and WORLD.kernel.now < end:
                WORLD.kernel.sleep(0.01)
            ending = Departure(self.rank, "its process has ended", False)
            WORLD.kernel.after(_TOLD_S, lambda: self._store.depart(ending))
        self._kill()
        if kill:
            self.agent.close()

    def check_start(self) -> None:
        if self.courier.number == 1 and not self.courier.is_up:
            raise StartFailed("the first courier has ended before MPI was up")


def install() -> None:
    """Replace what would start real couriers, once."""
    connection.Couriers = Couriers  # type: ignore[misc,assignment]
    channel.socket = Sockets  # type: ignore[assignment]
    courier_main.select = SimpleNamespace(poll=Poll, POLLIN=select.POLLIN)  # type: ignore[assignment]
    courier_main._Forward = lambda trainer: logging.NullHandler()  # type: ignore[assignment,misc]
    connection.find_agent = lambda config, size: Agent()  # type: ignore[assignment,return-value]


def begin(kernel: Scheduler, history: History) -> None:
    WORLD.__init__()  # type: ignore[misc]
    WORLD.kernel, WORLD.history = kernel, history


def left(trainer: Process) -> None:
    """Let the others hear that a trainer has ended, unless its node is dead, too."""
    kernel, newest = WORLD.kernel, WORLD.newest.get(trainer)
    if newest is None:
        return
    if not WORLD.history.launch.node_died and trainer not in WORLD.silent:
        ending, store = Departure(newest.rank, "its process has ended", False), newest._store
        kernel.after(_TOLD_S + kernel.random.random(), lambda: store.depart(ending))
        if newest.rank == 0:
            kernel.after(_LINGERS_S * (1 + kernel.random.random()), store.lose)
    for reader, tasks in list(WORLD.readers.items()):  # the courier polls the pidfd of its trainer, too
        if reader.owner is not None and reader.owner.parent is trainer:
            for task in tasks:
                kernel.after(0.0, lambda task=task: kernel.wake(task))
            tasks.clear()


def exit_trainer() -> None:
    """Do what a trainer does at its interpreter's end."""
    connection.close_all()


def processes() -> list[Process]:
    return [courier for store in WORLD.stores.values() for epoch in store.epochs.values()
            for courier in epoch.couriers if courier.is_alive]  # fmt: skip
