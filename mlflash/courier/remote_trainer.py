"""The courier's side of its trainer: questions and notices to it in the middle of a job."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from ..errors import MlflashError, SaveFailed
from ..events import Event
from ..memory.own_slots import SlotFile, SlotId
from ..mpi.world import World
from ..protocol.save_request import SaveRequest
from ..redundancy.deduplication import Piece, Plan, ShareableLeaf, SharingNews
from . import wire_format as wire
from .wire_format import Frame, Kind, Outcome


class TrainerLost(MlflashError):
    """The trainer has ended and cannot answer."""


class Link:
    """The socket to the trainer, shared by all threads of the courier."""

    def __init__(self, sock: socket.socket, trains_on: frozenset[int] = frozenset()):
        self.sock, self.trains_on = sock, trains_on
        self.is_lost = Event()
        self._sending = threading.Lock()
        self._waiting: dict[int, tuple[Event, list[Frame]]] = {}
        self._questions = 0

    def send(self, kind: Kind, session: int, number: int, name: str, body: object) -> None:
        """Send a frame. If the trainer has gone, do nothing."""
        packed = wire.pack(kind, session, number, name, wire.encode(body))
        with self._sending:
            try:
                self.sock.sendall(packed)
            except OSError:
                self.lose()

    def lose(self) -> None:
        """Note that the trainer has gone, and wake all threads that wait for it."""
        self.is_lost.set()
        for woken, _ in list(self._waiting.values()):
            woken.set()

    def ask(self, world: World, session: int, job: int, name: str, *values: object) -> Any:
        """Ask the trainer something in the middle of a job. While this waits, MPI progresses as in other waits.

        Raises TrainerLost if it has ended, and what the trainer has raised.
        """
        _, gives = wire.QUESTIONS[name]
        self._questions += 1
        woken, replies = self._waiting[self._questions] = (Event(), [])
        number = self._questions
        try:
            self.send(Kind.QUESTION, session, number, name, (job, wire.encode(values)))
            world.wait_for(lambda: woken.is_set() or self.is_lost.is_set())
            if not replies:
                raise TrainerLost("the trainer of this rank has ended", rank=world.rank)
            outcome: Outcome = wire.decode(Outcome, replies[0].body)
            if outcome.error is not None:
                raise outcome.error
            return wire.decode(gives, outcome.result)
        finally:
            del self._waiting[number]

    def replied(self, frame: Frame) -> None:
        """Pass an answer to the thread that waits for it."""
        woken, replies = self._waiting.get(frame.number, (Event(), []))
        replies.append(frame)
        woken.set()


class RemoteTrainer:
    """The trainer as a session sees it: see `startup.context.TrainerEnd`."""

    def __init__(self, link: Link, session: int, world: World):
        self._link, self._session, self._world = link, session, world

    def prepare(self, wanted: Sequence[tuple[SlotId, int]], waiting: Sequence[SlotId] = ()) -> list[SlotId]:
        try:
            given: list[SlotId] = self._link.ask(self._world, self._session, 0, "prepare", [*wanted], [*waiting])
        except TrainerLost:
            return []  # no slot is being filled any more, but it is unknown which ones were
        return given

    def update(self, files: Iterable[SlotFile]) -> None:
        self._tell("update", [*files])

    def told_sharing(self, sharing: SharingNews) -> None:
        self._tell("told_sharing", sharing)

    def told_unhealed(self, is_unhealed: bool) -> None:
        self._tell("told_unhealed", is_unhealed)

    def _tell(self, name: str, value: object) -> None:
        self._link.send(Kind.EVENT, self._session, 0, name, value)


class RemoteAnswers:
    """A trainer's answers in the middle of one of its jobs: see `save_request.Trainer`."""

    def __init__(self, link: Link, session: int, world: World, job: int, request: SaveRequest | None,
                 plan_of: Callable[[int, int], Plan]):  # fmt: skip
        self._link, self._session, self._world, self._job = link, session, world, job
        self._plan_of = plan_of
        self._has_deferred = request is not None and request.has_deferred

    def _ask(self, name: str, *values: object) -> Any:
        return self._link.ask(self._world, self._session, self._job, name, *values)

    def _tell(self, name: str, value: object) -> None:
        self._link.send(Kind.EVENT, self._session, self._job, name, value)

    def shareable(self) -> list[ShareableLeaf]:
        leaves: list[ShareableLeaf] = self._ask("shareable")
        return leaves

    def digests(self, keys: Collection[int]) -> dict[int, int]:
        made: dict[int, int] = self._ask("digests", [*keys])
        return made

    def lay_out(self) -> Plan:
        number, manifest_nbytes = self._ask("lay_out")
        return self._plan_of(number, manifest_nbytes)

    def stage(self) -> tuple[int, dict[Piece, int]]:
        inode, checks, self._has_deferred = self._ask("stage")
        return inode, dict(checks)

    def handed_over(self) -> None:
        self._tell("handed_over", None)

    def begin_deferred(self) -> None:
        if self._has_deferred:
            self._tell("begin_deferred", None)

    def finish_deferred(self) -> tuple[MlflashError | None, dict[Piece, int]]:
        if not self._has_deferred:
            return None, {}
        try:
            problem, checks = self._ask("finish_deferred")
        except TrainerLost:
            return _lost(), {}
        return problem, dict(checks)

    def is_changed(self) -> MlflashError | None:
        if not self._has_deferred:
            return None
        try:
            problem: MlflashError | None = self._ask("is_changed")
        except TrainerLost:
            return _lost()
        return problem

    def cancel_deferred(self) -> None:
        if self._has_deferred:
            try:
                self._ask("cancel_deferred")
            except TrainerLost:
                pass  # its copies ended with it

    def ended(self, error: MlflashError | None, skipped: bool = False, at: float | None = None) -> None:
        self._tell("ended", (error, skipped, time.monotonic() if at is None else at))


def _lost() -> SaveFailed:
    return SaveFailed("its trainer ended before everything was copied")
