"""MPI for a few live ranks of a large world. Counts what they send, and generates what other ranks would send.

Live ranks are threads of this process. They run the unchanged code of mlflash on a module and communicators that have
all the functions of mpi4py which mlflash calls. All other ranks are *phantoms*. In a reduction they contribute what the
live ranks contribute, in a gather what `meeting.Fabric.phantoms` generates, and in an all-to-all nothing. Live ranks
send them no messages. The live ranks must be whole redundancy groups of first ranks of their nodes, including rank 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from scale.meeting import Call, Done, Fabric, Later, Made, Receive, raw_bytes

_DUPLICATES = {"given": ("control",), "control": ("world",), "world": ("data", "drain", "beat")}
"""Names of duplicates, in the order in which `world.World` and `BackgroundCollectives` create them."""


class Group:
    """The ranks of a communicator, as numbers in the world."""

    def __init__(self, members: Sequence[int]):
        self._members = members

    def Translate_ranks(self, ranks: Sequence[int], all_ranks: Group) -> list[int]:
        """Give the numbers of some ranks in the world."""
        return [self._members[rank] for rank in ranks]

    def Free(self) -> None:
        """Do nothing."""


class Comm:
    """One live rank's view of a communicator."""

    def __init__(self, fabric: Fabric, name: str, key: tuple[object, ...], members: Sequence[int], rank: int):
        self.fabric, self.name, self._key, self._members, self._me = fabric, name, key, members, rank
        self.rank, self.size = members.index(rank), len(members)
        self.live = [one for one in fabric.live if one in members]
        self._count = 0
        self._splits = iter(fabric.splits)
        self._names = iter(_DUPLICATES.get(name, ()))
        self._made = Made(rank, "communicator", self.size)
        if name != "given":
            fabric.made.append(self._made)

    def _next(self) -> tuple[object, ...]:
        self._count += 1
        return (*self._key, self._count)

    def Idup(self) -> tuple[Comm, Done]:
        """Begin to create another communicator of the same ranks."""
        return Comm(self.fabric, next(self._names, "aside"), self._next(), self._members, self._me), Done()

    def Split(self, color: int, key: int) -> Comm:
        """Create the next communicator of `Fabric.splits`."""
        kind = next(self._splits)
        members = self.fabric.members(kind, self._me)
        return Comm(self.fabric, kind, (*self._next(), kind, members[0]), members, self._me)

    def Get_group(self) -> Group:
        """Give the ranks of the communicator."""
        return Group(self._members)

    def Free(self) -> None:
        """Forget the object."""
        self.fabric.made.remove(self._made)

    # Collectives

    def _note(self, what: str, nbytes: int, received: int = 0) -> None:
        self.fabric.calls.append(Call(self._me, self.name, what, nbytes, received))

    def Ibarrier(self) -> Later:
        """Begin to wait for all live ranks."""
        key = self._next()
        self._note("Ibarrier", 0)
        self.fabric.meet(key, self._me, True)
        return Later(lambda: self.fabric.outcome(key, len(self.live), lambda met: True) is not None)

    def Iallreduce(self, values: np.ndarray, out: np.ndarray, op: str) -> Later:
        """Begin to reduce each number to the minimum or the sum."""
        key = self._next()
        self._note("Iallreduce", values.nbytes)
        self.fabric.meet(key, self._me, values.copy())

        def reduced(met: dict[int, np.ndarray]) -> np.ndarray:
            brought = list(met.values())
            if op == "MIN":
                return np.minimum.reduce(brought)
            assert op == "SUM"
            return np.sum(brought, axis=0) + (self.size - len(brought)) * met[min(met)]

        def finish() -> bool:
            found = self.fabric.outcome(key, len(self.live), reduced)
            if found is not None:
                out[:] = found
            return found is not None

        return Later(finish)

    def Iallgather(self, mine: np.ndarray, out: np.ndarray) -> Later:
        """Begin to tell all ranks how many bytes each contributes to the next gather."""
        self._note("Iallgather", mine.nbytes, out.nbytes)
        return self._tell_sizes(int(mine[0]), out)

    def Igather(self, mine: np.ndarray, out: np.ndarray | None) -> Later:
        """Begin to tell the first rank how many bytes each contributes to the next gather."""
        self._note("Igather", mine.nbytes, 0 if out is None else out.nbytes)
        return self._tell_sizes(int(mine[0]), out)

    def _tell_sizes(self, mine: int, out: np.ndarray | None) -> Later:
        key = self._next()
        self.fabric.meet(key, self.rank, mine)

        def made_up(met: dict[int, int]) -> tuple[np.ndarray, Sequence[bytes | None], int]:
            least = min(met, key=lambda rank: met[rank])
            every = self.fabric.made_up(self.name, met[least])
            sizes = np.array([met[least] if one is None else len(one) for one in every or [None] * self.size])
            own = [rank for rank in met if every is None or every[rank] is None]
            sizes[own] = [met[rank] for rank in own]
            return sizes, every or [None] * self.size, least

        def finish() -> bool:
            found = self.fabric.outcome(key, len(self.live), made_up)
            if found is not None and out is not None:
                out[:] = found[0]
            return found is not None

        return Later(finish)

    def Iallgatherv(self, mine: np.ndarray, into: list[Any]) -> Later:
        """Begin to give all ranks what each contributes. The sizes were told before."""
        self._note("Iallgatherv", mine.nbytes, into[0].nbytes)
        return self._give(mine, into[0])

    def Igatherv(self, mine: np.ndarray, into: list[Any] | None) -> Later:
        """Begin to give the first rank what each contributes."""
        self._note("Igatherv", mine.nbytes, 0 if into is None else into[0].nbytes)
        return self._give(mine, None if into is None else into[0])

    def _give(self, mine: np.ndarray, out: np.ndarray | None) -> Later:
        _, every, least = self.fabric.results[(*self._key, self._count)]
        key = self._next()
        self.fabric.meet(key, self.rank, mine.copy())

        def together(met: dict[int, np.ndarray]) -> np.ndarray:
            live = {rank: value.tobytes() for rank, value in met.items()}
            brought = [live.get(rank, live[least]) if one is None else one for rank, one in enumerate(every)]
            return np.frombuffer(b"".join(brought), dtype=np.uint8)

        def finish() -> bool:
            found = self.fabric.outcome(key, len(self.live), together)
            if found is not None and out is not None:
                out[:] = found
            return found is not None

        return Later(finish)

    def Ialltoall(self, mine: np.ndarray, out: np.ndarray) -> Later:
        """Begin to give each rank one number of each other rank. The numbers of phantoms are 0."""
        key = self._next()
        self._note("Ialltoall", mine.nbytes, out.nbytes)
        self.fabric.meet(key, self.rank, mine.copy())

        def finish() -> bool:
            met = self.fabric.outcome(key, len(self.live), dict)
            if met is not None:
                out[:] = 0
                for rank, brought in met.items():
                    out[rank] = brought[self.rank]
            return met is not None

        return Later(finish)

    def Ibcast(self, buffer: np.ndarray, root: int) -> Later:
        """Begin to give all ranks the value of one live rank."""
        key = self._next()
        mine = self.rank == root
        self._note("Ibcast", buffer.nbytes if mine else 0, 0 if mine else buffer.nbytes)
        if mine:
            self.fabric.meet(key, -1, buffer.copy())

        def finish() -> bool:
            with self.fabric.lock:
                found = self.fabric.met.get(key)
            if found is not None and not mine:
                raw_bytes(buffer)[:] = raw_bytes(found[-1])
            return found is not None

        return Later(finish)

    # Messages

    def Isend(self, message: Any, to: int, tag: int) -> Done:
        """Send a buffered message."""
        raw = raw_bytes(message).tobytes()
        self._note("Isend", len(raw))
        key = (*self._key, self.rank, to, tag)
        with self.fabric.lock:
            self.fabric.mail[key].append(raw)
        return Done()

    def Irecv(self, into: Any, source: int, tag: int) -> Receive:
        """Begin to receive a message."""
        return Receive(self.fabric, (*self._key, source, self.rank, tag), into[0] if isinstance(into, list) else into)

    def Iprobe(self, *_: object) -> bool:
        """Find no message. Nobody asks which ranks are alive."""
        return False


class Window:
    """Memory of the ranks of a communicator for Put, or the memory of a node from `Allocate_shared`."""

    def __init__(self, memory: np.ndarray | None, comm: Comm | None):
        self._memory, self._comm = memory, comm
        if comm is not None:
            self._key = (*comm._next(), "window")
            comm._note("Win.Create", 0)
            comm.fabric.meet(self._key, comm.rank, memory)
            self._made = Made(comm._me, "window", comm.size)
            comm.fabric.made.append(self._made)

    def Rput(self, message: list[Any], target: int, where: list[Any]) -> Later:
        """Put a message once the target has its window."""
        assert self._comm is not None
        comm, raw, key = self._comm, raw_bytes(message).copy(), self._key
        comm._note("Rput", raw.nbytes)

        def finish() -> bool:
            memory = comm.fabric.met[key].get(target)
            if memory is not None:
                raw_bytes(memory)[where[0] : where[0] + raw.nbytes] = raw
            return memory is not None

        return Later(finish)

    def Shared_query(self, rank: int) -> tuple[Any, int]:
        """Give the memory of a node."""
        assert self._memory is not None
        return self._memory.data, 8

    def Free(self) -> None:
        """Forget the object."""
        if self._comm is not None:
            self._comm.fabric.made.remove(self._made)

    def nothing(self, *_: object) -> None:
        """Do nothing. Locks are not needed, and every Put is complete."""

    Lock = Unlock = Lock_all = Unlock_all = Flush = Flush_all = Sync = nothing


def module() -> Any:
    """Create the object that replaces the module mpi4py.MPI."""
    windows = SimpleNamespace(
        Create=lambda memory, unit, comm: Window(memory, comm),
        Allocate=lambda nbytes, unit, comm: Window(np.zeros(nbytes, np.uint8), None),
        Allocate_shared=lambda nbytes, unit, comm: Window(np.zeros(nbytes, np.uint8), None),
    )
    return SimpleNamespace(
        MIN="MIN", SUM="SUM", BYTE="BYTE", UNDEFINED=-1, ANY_SOURCE=-2, MODE_NOCHECK=0, THREAD_MULTIPLE=3,
        COMM_NULL=None, COMM_SELF=None, COMM_TYPE_SHARED=0, Win=windows,
        COMM_WORLD=SimpleNamespace(size=0, Get_group=lambda: Group(())),
        Status=lambda: None, Query_thread=lambda: 3,
    )  # fmt: skip


def world(fabric: Fabric, rank: int) -> Comm:
    """Give a live rank its COMM_WORLD."""
    return Comm(fabric, "given", ("given",), range(fabric.size), rank)
