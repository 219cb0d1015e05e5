"""The functions of mpi4py that mlflash calls, for simulated processes, as nasty as the standard allows.

- A send takes its bytes at once (eager), or only when they are received (rendezvous). Bytes of a message may arrive in
  parts, and its receive ends later.
- A collective returns on each rank at a time of its own, as soon as what that rank needs is there.
- Bytes of a Put become visible late, in pieces, in any order, also after its request has ended; only Flush waits.
- Iprobe may not see yet what has arrived.
- What a dead process had on its way is lost from some moment on. Who waits for the dead waits for ever, or gets an
  error.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import threads
from scheduler import Process, Scheduler

NO_TAG = 3  # what mlflash probes for to push MPI's progress; nobody sends it
_EAGER_NBYTES = 64


class MpiError(Exception):
    """An error of MPI, as after the death of another rank."""


def raw_bytes(message: Any) -> np.ndarray:
    """The bytes of a buffer as mpi4py takes it."""
    buffer = message[0] if isinstance(message, list) else message
    return np.frombuffer(buffer, np.uint8) if isinstance(buffer, bytearray) else buffer.reshape(-1).view(np.uint8)


@dataclasses.dataclass(eq=False)
class Request:
    process: Process
    is_done: bool = False
    is_lost: bool = False
    error: MpiError | None = None

    def Test(self) -> bool:
        if not self.is_done:
            if self.error is None:
                threads.scheduler().poll_request()
            if self.error is not None and not self.is_done:
                raise self.error
        return self.is_done

    def end(self) -> None:
        self.is_done = True
        threads.scheduler().tell_news(self.process)


@dataclasses.dataclass(eq=False)
class Message:
    """A message on its way; ``copied`` is None while its bytes are still in the sender's buffer."""

    key: tuple[Any, int, int, int]  # communicator, source, target, tag
    source: np.ndarray
    copied: bytes | None
    request: Request
    has_arrived: bool = False
    is_lost: bool = False


@dataclasses.dataclass(eq=False)
class Collective:
    """One collective call on a communicator."""

    name: str
    needs: set[int]
    values: dict[int, Any] = dataclasses.field(default_factory=dict)
    requests: dict[int, Request] = dataclasses.field(default_factory=dict)
    ends: dict[int, Callable[[dict[int, Any]], None]] = dataclasses.field(default_factory=dict)
    is_complete: bool = False


class Network:
    """What connects the processes of one world of MPI.

    Args:
        kernel: the scheduler.
        processes: by rank.
        pace: how long messages take: fast, mixed or slow.
        has_errors: whether those who wait for the dead may get an error.
    """

    def __init__(self, kernel: Scheduler, processes: Sequence[Process], pace: str, has_errors: bool):
        self.kernel, self.processes, self.pace, self.has_errors = kernel, list(processes), pace, has_errors
        self.collectives: dict[Any, Collective] = {}
        self.mail: dict[Any, deque[Message]] = {}
        self.posted: dict[Any, deque[tuple[Any, Request]]] = {}
        self.windows: dict[Any, dict[int, Any]] = {}
        self.open: set[Any] = set()  # communicators and windows that are not freed, with the rank
        self._last_arrival: dict[Any, float] = {}
        for process in self.processes:
            process.at_death.append(lambda process=process: self.died(process))

    def delay(self) -> float:
        random = self.kernel.random
        if self.pace == "fast" or (self.pace == "mixed" and random.random() < 0.8):
            return random.random() * 2e-5
        return random.random() * 2e-3 if self.pace == "mixed" else 10 ** random.uniform(-6, -1.5)

    def world(self, process: Process) -> Comm:
        return Comm(self, "world", list(range(len(self.processes))), self.processes.index(process))

    def died(self, process: Process) -> None:
        """Lose what a dead process had on its way, on each connection from some moment on."""
        random, rank = self.kernel.random, self.processes.index(process)
        cut = set()
        for messages in self.mail.values():
            for message in messages:
                if message.request.process is not process or message.has_arrived:
                    continue
                if message.key[:3] in cut or message.copied is None or random.random() < 0.3:
                    cut.add(message.key[:3])
                    message.is_lost = True
        for collective in self.collectives.values():
            if not collective.is_complete or random.random() < 0.3:
                for request in collective.requests.values():
                    request.is_lost |= rank in collective.values and request.process is not process
        if self.has_errors:
            self.kernel.after(self.delay() * 100, lambda: self._fail_waits(rank))

    def _fail_waits(self, dead: int) -> None:
        """Raise an error where others wait for the dead."""
        error = MpiError(f"rank {dead} has died")
        waits = [
            request for (_, source, _, _), posted in self.posted.items() for _, request in posted if source == dead
        ]
        waits += [message.request for messages in self.mail.values() for message in messages if message.key[2] == dead]
        waits += [request for collective in self.collectives.values() if not collective.is_complete
                  and dead in collective.needs for request in collective.requests.values()]  # fmt: skip
        for request in waits:
            if not request.is_done:
                request.error = error
                self.kernel.tell_news(request.process)

    # Messages

    def arrive(self, message: Message) -> None:
        if message.is_lost or (message.copied is None and not message.request.process.is_alive):
            return
        message.has_arrived = True
        self.match(message.key)
        self.kernel.tell_news(self.processes[message.key[2]])

    def match(self, key: Any) -> None:
        mail, posted = self.mail.get(key), self.posted.get(key)
        while mail and posted and mail[0].has_arrived:
            if mail[0].copied is None and not mail[0].request.process.is_alive:
                return
            message, (into, request) = mail.popleft(), posted.popleft()
            if not request.process.is_alive:
                return
            raw = message.source if message.copied is None else np.frombuffer(message.copied, np.uint8)
            self._receive(message, raw.copy(), raw_bytes(into), request)

    def _receive(self, message: Message, raw: np.ndarray, into: np.ndarray, request: Request) -> None:
        """Write the bytes of a message, in one go or its second half first."""
        if not message.request.is_done:
            message.request.end()
        if raw.nbytes <= _EAGER_NBYTES or self.kernel.random.random() < 0.7:
            into[: raw.nbytes] = raw
            request.end()
            return
        middle = raw.nbytes // 2
        into[middle : raw.nbytes] = raw[middle:]

        def end() -> None:
            if request.process.is_alive:
                into[:middle] = raw[:middle]
                request.end()

        self.kernel.after(self.delay(), end)

    def send(self, key: Any, raw: np.ndarray, process: Process) -> Request:
        random, request = self.kernel.random, Request(process)
        is_eager = raw.nbytes <= _EAGER_NBYTES or random.random() < 0.5
        request.is_done = is_eager
        message = Message(key, raw, raw.tobytes() if is_eager else None, request)
        when = max(self._last_arrival.get(key[:3], 0.0), self.kernel.now + self.delay())  # messages do not overtake
        self._last_arrival[key[:3]] = when
        self.mail.setdefault(key, deque()).append(message)
        self.kernel.at(when, lambda: self.arrive(message))
        return request

    # Collectives

    def collect(self, key: Any, name: str, needs: Iterable[int], rank: int, value: Any,
                end: Callable[[dict[int, Any]], None]) -> Request:  # fmt: skip
        """Take part in a collective that is complete when the ranks ``needs`` have; then ``end`` gets all values."""
        collective = self.collectives.setdefault(key, Collective(name, set(needs)))
        request = Request(self.processes[rank])
        if collective.name != name:
            error = AssertionError(f"ranks call different collectives: {collective.name}, and {name} on rank {rank}")
            self.kernel.thread_errors.append((request.process, "MPI", error))
            return request
        collective.values[rank], collective.requests[rank], collective.ends[rank] = value, request, end
        if collective.is_complete:  # late to a broadcast
            self._return(collective, rank)
        elif collective.needs <= collective.values.keys():
            collective.is_complete = True
            for other in list(collective.requests):
                self._return(collective, other)
        return request

    def _return(self, collective: Collective, rank: int) -> None:
        request = collective.requests[rank]

        def end() -> None:
            if not request.is_lost and request.process.is_alive:
                collective.ends[rank](collective.values)
                request.end()

        self.kernel.after(self.delay(), end)


class Comm:
    """A communicator, as one of its ranks has it.

    Args:
        key: the same on all ranks.
        members: ranks of the network, in the order of the communicator.
        me: rank of the network.
    """

    def __init__(self, network: Network, key: Any, members: list[int], me: int):
        self.network, self.key, self.members, self.me = network, key, members, me
        self.rank, self.size = members.index(me), len(members)
        self._calls = 0
        self._groups: Counter[Any] = Counter()
        network.open.add((key, me))

    def Free(self) -> None:
        self.network.kernel.point("Free")
        self.network.open.discard((self.key, self.me))

    def Get_attr(self, _: int) -> int:
        return 1 << 20

    def Get_group(self) -> Group:
        return Group(self.members)

    @staticmethod
    def Compare(comm: Comm, other: Comm) -> int:
        return Mpi.IDENT if comm.members == other.members else Mpi.UNEQUAL

    def _wait(self, request: Request) -> None:
        while not request.Test():
            pass

    # Making communicators

    def Idup(self) -> tuple[Comm, Request]:
        request = self._collect("Idup", None, lambda values: None)
        return Comm(self.network, (self.key, self._calls), self.members, self.me), request

    def Split(self, color: int, key: int) -> Comm | None:
        colors: dict[int, int] = {}
        self._wait(self._collect("Split", color, colors.update))
        if color == Mpi.UNDEFINED:
            return None
        members = [member for member in self.members if colors[member] == color]
        return Comm(self.network, (self.key, self._calls, color), members, self.me)

    def Create_group(self, group: Group, tag: int) -> Comm:
        self.network.kernel.point("Create_group")
        self._groups[tuple(group.members), tag] += 1
        key = (self.key, tuple(group.members), tag, self._groups[tuple(group.members), tag])
        self._wait(self.network.collect(key, "Create_group", group.members, self.me, None, lambda values: None))
        return Comm(self.network, key, group.members, self.me)

    # Collectives

    def _collect(self, name: str, value: Any, end: Callable[[dict[int, Any]], None], needs: Iterable[int] | None = None
                 ) -> Request:  # fmt: skip
        self.network.kernel.point(name)
        self._calls += 1
        members = self.members if needs is None else needs
        return self.network.collect((self.key, self._calls), name, members, self.me, value, end)

    def Ibarrier(self) -> Request:
        return self._collect("Ibarrier", None, lambda values: None)

    def Iallreduce(self, values: np.ndarray, out: np.ndarray, op: Any) -> Request:
        def end(met: dict[int, Any]) -> None:
            out[:] = op(list(met.values()))

        return self._collect("Iallreduce", values.copy(), end)

    def _gathered(self, met: dict[int, Any]) -> np.ndarray:
        return np.concatenate([met[member] for member in self.members])

    def Iallgather(self, values: np.ndarray, out: np.ndarray) -> Request:
        def end(met: dict[int, Any]) -> None:
            out[:] = self._gathered(met)

        return self._collect("Iallgather", values.copy(), end)

    def Iallgatherv(self, values: np.ndarray, into: list[Any]) -> Request:
        return self.Iallgather(values, into[0])

    def Igather(self, values: np.ndarray, out: np.ndarray | None) -> Request:
        def end(met: dict[int, Any]) -> None:
            if out is not None:
                out[:] = self._gathered(met)

        request = self._collect("Igather", values.copy(), end)
        if self.rank:  # only the root waits for the others
            self.network.kernel.after(self.network.delay(), request.end)
        return request

    def Igatherv(self, values: np.ndarray, into: list[Any] | None) -> Request:
        return self.Igather(values, None if into is None else into[0])

    def Ialltoall(self, values: np.ndarray, out: np.ndarray) -> Request:
        def end(met: dict[int, Any]) -> None:
            out[:] = [met[member][self.rank] for member in self.members]

        return self._collect("Ialltoall", values.copy(), end)

    def Ibcast(self, buffer: Any, root: int) -> Request:
        source = self.members[root]

        def end(met: dict[int, Any]) -> None:
            if self.rank != root:
                raw_bytes(buffer)[:] = met[source]

        value = raw_bytes(buffer).copy() if self.rank == root else None
        return self._collect(f"Ibcast from {source}", value, end, needs=[source])

    # Messages

    def Isend(self, message: Any, to: int, tag: int) -> Request:
        self.network.kernel.point("Isend")
        key = (self.key, self.me, self.members[to], tag)
        return self.network.send(key, raw_bytes(message), self.network.processes[self.me])

    def Irecv(self, into: Any, source: int, tag: int) -> Request:
        self.network.kernel.point("Irecv")
        key, request = (self.key, self.members[source], self.me, tag), Request(self.network.processes[self.me])
        self.network.posted.setdefault(key, deque()).append((into, request))
        self.network.match(key)
        return request

    def Iprobe(self, source: int, tag: int, status: Status | None = None) -> bool:
        if tag == NO_TAG:
            return False
        for rank, member in enumerate(self.members):
            mail = self.network.mail.get((self.key, member, self.me, tag))
            first = mail[0] if mail and mail[0].has_arrived else None
            if first is not None and first.copied is not None and self.network.kernel.random.random() < 0.7:
                if status is not None:
                    status.source, status.count = rank, len(first.copied)
                return True
        return False

    def Recv(self, into: Any, source: int, tag: int) -> None:
        self._wait(self.Irecv(into, source, tag))


class Group:
    def __init__(self, members: Sequence[int]):
        self.members, self.size = list(members), len(members)

    def Translate_ranks(self, ranks: Sequence[int], other: Group) -> list[int]:
        numbers = {member: number for number, member in enumerate(other.members)}
        return [numbers.get(self.members[rank], Mpi.UNDEFINED) for rank in ranks]

    def Incl(self, ranks: Sequence[int]) -> Group:
        return Group([self.members[rank] for rank in ranks])

    def Free(self) -> None:
        pass


class Status:
    source = count = 0

    def Get_source(self) -> int:
        return self.source

    def Get_count(self) -> int:
        return self.count


class Window:
    """A window, always locked. A Put becomes visible in up to three pieces, in any order, each at a time of its own."""

    def __init__(self, memory: np.ndarray | None, unit: int, comm: Comm):
        self._comm, self._network, self.key = comm, comm.network, ("window", comm.key, comm._calls + 1)
        self._network.windows.setdefault(self.key, {})[comm.me] = memory
        self._pending: dict[int, int] = {}
        comm._wait(comm._collect("Win.Create", None, lambda met: None))
        self._network.open.add((self.key, comm.me))

    def Rput(self, message: Any, target: int, where: Sequence[Any]) -> Request:
        network, kernel, member = self._network, self._network.kernel, self._comm.members[target]
        kernel.point("Rput")
        origin, holder = network.processes[self._comm.me], network.processes[member]
        source, request = raw_bytes(message), Request(origin)
        into = raw_bytes(network.windows[self.key][member])[where[0] :][: source.nbytes]
        cuts = sorted({0, source.nbytes, *(kernel.random.randrange(source.nbytes + 1) for _ in range(2))})
        pieces = list(itertools.pairwise(cuts))
        self._pending[target] = self._pending.get(target, 0) + len(pieces)

        def take() -> None:
            if not origin.is_alive:
                return
            raw = source.copy()
            request.end()
            for first, last in pieces:
                kernel.after(network.delay(), lambda first=first, last=last: show(raw, first, last))

        def show(raw: np.ndarray, first: int, last: int) -> None:
            if holder.is_alive and (origin.is_alive or kernel.random.random() < 0.5):
                into[first:last] = raw[first:last]
                kernel.tell_news(holder)
            self._pending[target] -= 1
            kernel.tell_news(origin)

        kernel.after(network.delay(), take)
        return request

    def Flush(self, target: int) -> None:
        while self._pending.get(target):
            self._network.kernel.sleep(1e-4)

    def Free(self) -> None:
        self._network.kernel.point("Win.Free")
        self._network.open.discard((self.key, self._comm.me))

    def Lock_all(self, *_: object) -> None:
        pass

    Unlock_all = Sync = Lock_all


class Mpi:
    """Stands for the module mpi4py.MPI.

    Attributes:
        worlds: the communicator of all ranks, of each process that has initialized MPI.
    """

    MIN, SUM = np.minimum.reduce, np.add.reduce
    BYTE, UNDEFINED, ANY_SOURCE, MODE_NOCHECK, TAG_UB = "BYTE", -32766, -2, 0, 0
    IDENT, CONGRUENT, UNEQUAL = 0, 1, 3
    COMM_NULL = None
    Comm, Status, Exception = Comm, Status, MpiError
    Win = SimpleNamespace(Create=Window)

    def __init__(self) -> None:
        self.worlds: dict[Process, Comm] = {}

    @property
    def COMM_WORLD(self) -> Any:
        task = None if threads.SCHEDULER is None else threads.SCHEDULER.current
        return None if task is None else self.worlds.get(task.process)

    def Is_initialized(self) -> bool:
        return self.COMM_WORLD is not None

    def Is_finalized(self) -> bool:
        return False
